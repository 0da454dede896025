"""Unsloth Studio: the YAML of its training page."""

from __future__ import annotations

import re
from typing import Any

from finetune.recipe.foreign import common
from finetune.recipe.foreign.rules import ConfigReader, Ignore, Keep, Read, Refuse, Rule, Tool, as_list, each
from finetune.recipe.foreign.shared import TRAINING_DEFAULTS, read_batch, read_optimizer, read_steps, read_targets
from finetune.settings.base_formats import NF4, switches

_TEXT = Ignore("for images or sound; rows are text here")
_T, _L = "training.", "lora."

_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

KEYS: dict[str, Rule] = {
    **each(Read(), """
        data.format_type data.local_datasets training.training_type training.num_epochs training.batch_size
        training.gradient_accumulation_steps training.warmup_steps training.warmup_ratio training.max_steps
        training.eval_steps training.optim lora.target_modules lora.finetune_vision_layers data.local_dataset
    """),
    **each(Refuse("name the layers in lora.target_modules", (True,)), """
        lora.finetune_attention_modules lora.finetune_mlp_modules
    """),
    **each(Keep("dataset.split"), "data.split data.train_split"),
    **each(Refuse(_TEXT.reason), "lora.vision_all_linear audio_input audio_type"),
    "model": Keep("model_name_or_path"), "data.dataset": Keep("dataset.path"), "data.subset": Keep("dataset.name"),
    "data.eval_split": Keep("dataset.eval_split"), f"{_T}max_seq_length": Keep("max_length"),
    f"{_T}load_in_4bit": Keep("load_in_4bit"), f"{_T}output_dir": Keep("output_dir"),
    f"{_T}learning_rate": Keep("learning_rate", float), f"{_T}save_steps": Keep("save_steps"),
    f"{_T}weight_decay": Keep("weight_decay", float), f"{_T}random_seed": Keep("seed"), f"{_T}packing": Keep("packing"),
    f"{_T}train_on_completions": Keep("train_on_inputs", lambda on: not on), f"{_T}gradient_checkpointing": common.MEMORY,
    f"{_T}lr_scheduler_type": Keep("lr_scheduler_type"),
    f"{_T}trust_remote_code": Ignore("models that transformers knows need no code of the hub"),
    f"{_T}max_grad_norm": Keep("max_grad_norm", float), f"{_L}lora_r": Keep("lora_r"), f"{_L}lora_alpha": Keep("lora_alpha"),
    f"{_L}lora_dropout": Keep("lora_dropout", float), f"{_L}use_rslora": Keep("use_rslora"),
    f"{_L}use_dora": Keep("use_dora"), f"{_L}use_loftq": Refuse("adapters start from zero, not from LoftQ"),
    f"{_L}init_lora_weights": Refuse("adapters start from PEFT's default", (True,)),
    f"{_L}finetune_language_layers": Refuse("layers of the language model are trained", (True,)),
    "is_embedding": Refuse("answers are trained"), "logging.*": common.TRACKERS,
    "inference.*": Ignore("for generation, not for training"), "export.*": common.UPLOAD,
}  # fmt: skip

#: Defaults of `unsloth train --config`, and of the trainer where that has no key. The Studio's page has others for two.
DEFAULTS: dict[str, Any] = {
    **{name: value for name, value in TRAINING_DEFAULTS.items() if name != "warmup_ratio"},
    "num_train_epochs": 3.0, "learning_rate": 2e-4, "optim": "adamw_8bit", "weight_decay": 0.01,
    "seed": 3407, "warmup_steps": 5, "max_length": 2048, "excess_length": "truncate", "lora_r": 64, "lora_alpha": 16.0,
    "lora_dropout": 0.0, "target_modules": _LINEAR, **switches(NF4), "packing": False,
    "train_on_inputs": True,
}  # fmt: skip
_VISION_MODEL = r"-vl\b|vision|gemma-?(3n|3-(4|12|27)b|4)|pixtral|llava|mistral-small-3|ministral-3"
_VISION_NOTE = "adapters are on the language model only; there the layers that read images have some, too"
#: Settings for which the Studio's page has another default than `unsloth train`.
_PAGE = {"lora_r": ("lora.lora_r", 16), "weight_decay": ("training.weight_decay", 0.001)}


def finish(config: ConfigReader) -> None:
    """Keys of the Studio that combine."""
    read_batch(config, f"{_T}batch_size", f"{_T}gradient_accumulation_steps", 2, 4)
    _steps(config)
    read_optimizer(config, f"{_T}optim")
    model = str(config.overrides.get("model_name_or_path") or config.value("model", ""))
    trains_vision = config.is_on(f"{_L}finetune_vision_layers") and re.search(_VISION_MODEL, model, re.I)
    config.ignore(f"{_L}finetune_vision_layers", _TEXT.reason, _VISION_NOTE if trains_vision else "")
    for setting, (key, value) in _PAGE.items():
        if key not in config.values and setting not in config.overrides:
            config.notes.append(
                f"{key} is not set: {DEFAULTS[setting]}, as in `unsloth train`; the Studio's page takes {value}"
            )
    config.require_lora(f"{_T}training_type", "lora", "qlora", "LoRA/QLoRA")
    if f"{_L}target_modules" in config.values:
        if not as_list(config.value(f"{_L}target_modules")):
            config.keep(f"{_L}target_modules", "target_modules", _LINEAR)
        else:
            read_targets(config, f"{_L}target_modules")
    formats = {"auto": "auto", "alpaca": "alpaca", "chatml": "messages", "sharegpt": "sharegpt", "raw_text": "text"}
    if (format_type := config.value("data.format_type")) in formats:
        config.keep("data.format_type", "dataset.format", formats[format_type])
    elif format_type is not None:
        config.refuse("data.format_type", "is not a format that finetune reads", "dataset.format")
    for key in ("data.local_datasets", "data.local_dataset"):
        if config.is_on(key):
            config.keep(key, "dataset.path", config.value(key))
        else:
            config.ignore(key, "is not set")


def _steps(config: ConfigReader) -> None:
    """Steps over epochs, which are 0 beside them, the share of warmup over its steps, and evaluations as a share of steps."""
    read_steps(config, f"{_T}max_steps")
    if "max_steps" in config.settings:
        config.ignore(f"{_T}num_epochs", "max_steps is set")
    elif (epochs := config.value(f"{_T}num_epochs")) is not None:
        config.keep(f"{_T}num_epochs", "num_train_epochs", float(epochs))
    config.keep(f"{_T}warmup_ratio", "warmup_ratio", config.value(f"{_T}warmup_ratio"))
    if "warmup_ratio" in config.settings:
        config.ignore(f"{_T}warmup_steps", "warmup_ratio is set")
    else:
        config.keep(f"{_T}warmup_steps", "warmup_steps", config.value(f"{_T}warmup_steps"))
    config.ignore(f"{_T}eval_steps", common.STEPS.reason)


TOOL = Tool(
    "Unsloth Studio",
    "training.training_type training.max_seq_length training.num_epochs lora.finetune_mlp_modules",
    KEYS, DEFAULTS, finish, nested=True,
)  # fmt: skip
