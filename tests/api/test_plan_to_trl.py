"""A plan's arguments for plain TRL train what `finetune run` trains."""

import pytest
from trl import SFTTrainer

import finetune
from finetune.errors import FinetuneError
from finetune.events import Step, read_events
from finetune.recipe import load_recipe
from finetune.run.prepare import create_run, prepare
from finetune.run.worker import Worker

RECIPE = [
    "dataset.max_rows=24", "max_steps=5", "effective_batch_size=6", "per_device_train_batch_size=2", "eval_steps=0",
    "sample_answers=0", "dtype=float32",
    "learning_rate=2e-4",  # Adam makes a step of it also of gradients that are nearly rounding, which differs by CPU
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"load_in_4bit": "false"}, {"activation_checkpointing": "true", "load_in_4bit": "true"}], ids=str
)
def test_plain_trl_has_the_losses_of_a_run(tmp_path, more):
    overrides = [*RECIPE, *(f"{name}={value}" for name, value in more.items()), f"output_dir={tmp_path / 'run'}"]
    run = create_run(prepare(load_recipe("tiny-cpu", overrides)))
    assert Worker(run).main() == 0
    losses = [event.loss for event in read_events(run.events) if isinstance(event, Step)]

    plan = finetune.read_plan(run.plan)
    trainer = SFTTrainer(**plan.to_trl(str(tmp_path / "trl")))
    trainer.train()
    seen = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert seen == pytest.approx(losses, rel=1e-6)
    assert len(losses) == 5


def test_a_plan_for_a_gpu_that_is_not_here_says_so():
    with pytest.raises(FinetuneError, match="torch sees no GPU here"):
        finetune.plan("tiny", "support", gpu="rtx-4090").to_trl()


@pytest.mark.parametrize("setting", [{"activation_offloading": True}, {"int8_activations": True}], ids=str)
def test_what_plain_trl_lacks_is_refused_by_name(setting):
    plan = finetune.plan("tiny", "support", gpu="cpu", **setting)
    with pytest.raises(FinetuneError, match=next(iter(setting))):
        plan.to_trl()
