"""TRL's own YAML, as `trl sft --config` reads it."""

from __future__ import annotations

from typing import Any

from finetune.recipe.foreign.rules import ConfigReader, Ignore, Keep, Read, Refuse, Rule, Tool
from finetune.recipe.foreign.shared import (
    DATASET_CACHE,
    KERNELS,
    MEMORY,
    NOT_TRAINED,
    TRAINING_ARGUMENTS,
    TRAINING_DEFAULTS,
    read_targets,
    read_training_arguments,
)  # fmt: skip

KEYS: dict[str, Rule] = {
    **TRAINING_ARGUMENTS,
    "model_name_or_path": Keep("model_name_or_path"),
    "model_revision": Keep("model_revision", lambda name: None if name == "main" else name),
    "dtype": Keep("dtype"), "torch_dtype": Keep("dtype"), "attn_implementation": KERNELS,
    "model_init_kwargs": Refuse("the model is loaded by finetune"),
    "trust_remote_code": Ignore("models that transformers knows need no code of the hub; else set it here with model_revision"),
    "use_peft": Read(), "lora_r": Keep("lora_r"), "lora_alpha": Keep("lora_alpha"), "lora_dropout": Keep("lora_dropout", float),
    "lora_target_modules": Read(), "lora_task_type": Ignore("is what finetune does"), "use_rslora": Keep("use_rslora"),
    "use_dora": Keep("use_dora"),
    "lora_modules_to_save": Refuse("whole modules are not trained beside adapters"),
    "lora_target_parameters": Refuse("adapters are on linear layers"),
    "load_in_4bit": Keep("load_in_4bit"), "load_in_8bit": Keep("load_in_8bit"),
    "bnb_4bit_quant_type": Refuse("4 bits are NF4", ("nf4",)),
    "use_bnb_nested_quant": Ignore("4 bits are always quantised twice, which saves 0.4 bits a weight"),
    "bnb_4bit_quant_storage": MEMORY,
    "dataset_name": Read(), "dataset_config": Keep("dataset.name"), "dataset_train_split": Keep("dataset.split"),
    "dataset_test_split": Read(),
    "datasets": Refuse("one dataset is read", lifted_by="dataset.path"), "dataset_streaming": MEMORY,
    "dataset_text_field": Read(), "dataset_num_proc": DATASET_CACHE,
    "dataset_kwargs": Refuse("rows are prepared by finetune"), "max_length": Keep("max_length"),
    "max_seq_length": Keep("max_length"),
    "truncation_mode": Refuse("the start is kept", ("keep_start",)), "packing": Keep("packing"), "eval_packing": MEMORY,
    "packing_strategy": Refuse("rows are packed whole", ("bfd", "ffd")), "padding_free": MEMORY, "pad_to_multiple_of": MEMORY,
    "pad_token": Ignore("padding is never learnt"),
    "eos_token": Refuse("the model's own EOS is used"), "chat_template_path": Keep("chat_template"),
    "completion_only_loss": Read(), "assistant_only_loss": Read(),
    "loss_type": Refuse("the loss is the cross entropy", ("nll",)), "activation_offloading": MEMORY,
    "shuffle_dataset": Ignore("rows are shuffled anyway"),
    "router_aux_loss_coef": Refuse("the router's loss is not added"), "use_liger": KERNELS, "ignore_bias_buffers": KERNELS,
    "gradient_checkpointing_use_reentrant": MEMORY,
    "use_vllm": NOT_TRAINED,
}  # fmt: skip

DEFAULTS: dict[str, Any] = {
    **TRAINING_DEFAULTS, "learning_rate": 2e-5, "lora_r": 16, "lora_alpha": 32.0, "lora_dropout": 0.05, "max_length": 1024,
    "excess_length": "truncate", "load_in_4bit": False, "load_in_8bit": False, "packing": False,
}  # fmt: skip


def finish(config: ConfigReader) -> None:
    """Keys of TRL that combine."""
    read_training_arguments(config)
    read_targets(config, "lora_target_modules")
    if config.is_on("use_peft"):
        config.ignore("use_peft", "is what finetune does")
    else:
        config.refuse("use_peft", "is off, which trains all parameters; finetune trains LoRA adapters")
    _loss(config)
    if not config.is_replaced("dataset.path", ["dataset_name"]) and "dataset_name" in config.values:
        config.keep("dataset_name", "dataset.path", config.value("dataset_name"))
    if "dataset_text_field" in config.values:
        field = config.value("dataset_text_field")
        if field == "text":
            config.ignore("dataset_text_field", "is found by its name")
        else:
            config.keep("dataset_text_field", "dataset.columns", {"text": field})
    if "dataset_test_split" in config.values:
        if config.value("eval_strategy", "no") == "no":
            config.ignore("dataset_test_split", "eval_strategy is no")
        else:
            config.keep("dataset_test_split", "dataset.eval_split", config.value("dataset_test_split"))


def _loss(config: ConfigReader) -> None:
    """Which tokens are learnt. TRL also learns the prompts of messages, but of prompt and completion only the completions."""
    answer_only_keys = [key for key in ("assistant_only_loss", "completion_only_loss") if config.is_on(key)]
    for key in ("assistant_only_loss", "completion_only_loss"):
        if key in config.values:
            config.keep(key, "train_on_inputs", not answer_only_keys)
    if "train_on_inputs" not in config.settings and "train_on_inputs" not in config.overrides:
        config.refuse(
            "assistant_only_loss",
            "is not set: TRL learns prompts of messages, too (train_on_inputs=true), but not of prompt and completion (false)",
            "train_on_inputs",
        )


TOOL = Tool(
    "TRL",
    frozenset({"use_peft", "dataset_name", "dataset_text_field", "lora_task_type", "assistant_only_loss"}),
    KEYS,
    DEFAULTS,
    finish,
)
