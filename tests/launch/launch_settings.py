"""Settings as a plan resolves them, with a `launch` section."""

from finetune.recipe import recipe_from
from finetune.settings import plainest

DEEPSPEED = [
    {"zero_stage": 2},
    {"zero_stage": 2, "offload": "cpu"},
    {"zero_stage": 3},
    {"zero_stage": 3, "offload": "cpu"},
    {"zero_stage": 3, "offload": "nvme", "nvme_path": "/nvme"},
]


def settings(**launch):
    recipe = recipe_from({"model_name_or_path": "tiny", "dataset": {"path": "support"}, "launch": launch})
    return plainest(
        recipe, dtype="bfloat16", per_device_train_batch_size=2, gradient_accumulation_steps=4, load_in_4bit=True,
        effective_batch_size=8 * recipe.launch.num_processes, load_in_8bit=False,
        optim="adamw_torch_fused", learning_rate=1e-4,
    )  # fmt: skip
