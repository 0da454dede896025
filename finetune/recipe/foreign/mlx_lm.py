"""mlx-lm: the YAML of `mlx_lm.lora`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.recipe.foreign import common
from finetune.recipe.foreign.rules import ConfigReader, Ignore, Keep, Read, Refuse, Rule, Tool, as_list, each
from finetune.recipe.foreign.shared import first_columns, read_batch

#: mlx-lm doesn't clip gradients: a norm that no gradient reaches.
_NO_CLIPPING = 1e9
_EVALUATION = Ignore("all held-out rows are evaluated")

KEYS: dict[str, Rule] = {
    **each(Read(), """
        train fine_tune_type optimizer optimizer_config.* data num_layers lora_layers batch_size grad_accumulation_steps iters
        lr_schedule.* lora_parameters.keys lora_parameters.scale lora_parameters.alpha mask_prompt
    """),
    **each(Ignore("`finetune eval` scores"), "test hf_dataset.test_split"),
    **each(common.MEMORY, "grad_checkpoint clear_cache_threshold"),
    **each(common.TRACKERS, "wandb report_to project_name"),
    **each(Keep("dataset.path"), "hf_dataset.path hf_dataset.name"),
    "model": Keep("model_name_or_path"),
    "training_mode": Refuse("of mlx files those of supervised training are read", ("normal",)),
    "train_mode": Refuse("of mlx files those of supervised training are read", ("sft",)), "seed": Keep("seed"),
    "learning_rate": Keep("learning_rate", float), "val_batches": _EVALUATION, "steps_per_report": common.EVERY_STEP,
    "steps_per_eval": Keep("eval_steps"), "save_every": Keep("save_steps"), "adapter_path": Keep("output_dir"),
    "adapter_file": Ignore("the adapter is in the run directory"), "resume_adapter_file": common.OTHER_ADAPTER,
    "test_batches": _EVALUATION, "max_seq_length": Keep("max_length"), "lora_parameters.rank": Keep("lora_r"),
    "lora_parameters.dropout": Keep("lora_dropout", float), "config": Ignore("of mlx-lm's command line"),
    "hf_dataset.train_split": Keep("dataset.split"), "hf_dataset.valid_split": Keep("dataset.eval_split"),
    **{f"hf_dataset.{name}_feature": Read() for name in ("prompt", "completion", "chat", "text")},
    "hf_dataset.config.name": Keep("dataset.name"),
    "hf_dataset": Refuse("a list of datasets is not read", lifted_by="dataset.path"),
}  # fmt: skip

DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-5, "lr_scheduler_type": "constant", "warmup_ratio": 0.0, "max_grad_norm": _NO_CLIPPING,
    "optim": "adamw_torch", "weight_decay": 0.0,
    "seed": 0, "max_length": 2048, "excess_length": "truncate", "lora_r": 8, "lora_dropout": 0.0,
    "target_modules": "all-linear", "max_steps": 1000,
    "packing": False, "train_on_inputs": True,
}  # fmt: skip
#: What mlx-lm does without the keys: `CONFIG_DEFAULTS` of mlx_lm/lora.py.
_SCALE, _LAYERS = 20.0, 16
_BIAS_NOTE = "MLX's Adam does not correct its bias by default; PyTorch's does"
#: Columns of rows without the keys that name them.
_COLUMNS = {"prompt": "prompt", "completion": "completion", "chat": "messages", "text": "text"}
_COMPLETIONS_NOTE = (
    "mlx-lm writes rows of prompt and completion with the chat template; here they are joined as they are: for such rows set "
    "dataset.format=alpaca dataset.columns={instruction: prompt, output: completion}"
)
_LAST_ANSWER_NOTE = "of a conversation mlx-lm then learns the last answer only, and finetune every answer"
#: MLX's default weight decay of AdamW.
_ADAMW_DECAY = 0.01


def finish(config: ConfigReader) -> None:
    """Keys of mlx-lm that combine."""
    if config.value("train") is False:
        config.refuse("train", "this file tests, it does not train; train: true trains with its settings")
    config.ignore("train", "`finetune run` trains")
    read_batch(config, "batch_size", "grad_accumulation_steps", 4)
    _steps(config)
    if config.value("fine_tune_type") == "dora":
        config.keep("fine_tune_type", "use_dora", True)
    else:
        config.require_lora("fine_tune_type", "lora")
    _optimizer(config)
    _layers(config)
    if (names := config.value("lora_parameters.keys")) is not None:
        config.keep("lora_parameters.keys", "target_modules", sorted({name.split(".")[-1] for name in as_list(names)}))
    scale, rank = config.value("lora_parameters.scale", _SCALE), config.settings.get("lora_r", DEFAULTS["lora_r"])
    config.keep("lora_parameters.scale", "lora_alpha", float(scale) * rank)
    config.assume("lora_alpha", float(scale) * rank)
    alpha_note = (
        "" if "lora_parameters.scale" in config.values else f"mlx-lm reads scale, which is not set: {_SCALE:g} there and here"
    )
    config.ignore("lora_parameters.alpha", "mlx-lm reads scale", alpha_note)
    _schedule(config)
    masks = config.is_on("mask_prompt")
    config.keep("mask_prompt", "train_on_inputs", not masks, _LAST_ANSWER_NOTE if masks else "")
    _data(config)


def _layers(config: ConfigReader) -> None:
    """Which decoder layers get adapters: here every one, there the last 16 unless the file says otherwise."""
    key = next((key for key in ("num_layers", "lora_layers") if key in config.values), None)
    if key is None:
        config.notes.append(f"num_layers is not set: mlx-lm's adapters are in the last {_LAYERS} layers, here in every layer")
    elif config.value(key) > 0:
        config.refuse(key, f"adapters only in the last layers; {key}=-1 is every layer, as here")
    else:
        config.ignore(key, "every layer gets an adapter, as here")


def _steps(config: ConfigReader) -> None:
    """`iters` counts micro-batches."""
    iters, accumulation = config.value("iters", 1000), int(config.value("grad_accumulation_steps", 1))
    if iters % accumulation:
        config.refuse("iters", f"is no multiple of grad_accumulation_steps {accumulation}", "max_steps")
    elif "iters" in config.values:
        config.keep("iters", "max_steps", iters // accumulation)
    else:
        config.assume("max_steps", iters // accumulation)


def _optimizer(config: ConfigReader) -> None:
    name = str(config.value("optimizer", "adam")).lower()
    if name not in ("adam", "adamw"):
        config.refuse("optimizer", "adam and adamw are supported", "optim")
        return
    if "optimizer" in config.values:
        config.keep("optimizer", "optim", "adamw_torch", _BIAS_NOTE)
    else:
        config.notes.append(f"optimizer is not set: adam; {_BIAS_NOTE}")
    if name == "adamw":
        config.assume("weight_decay", float(config.value("optimizer_config.adamw.weight_decay", _ADAMW_DECAY)))
    for key in [key for key in config.values if key.startswith("optimizer_config.")]:
        if key == f"optimizer_config.{name}.weight_decay":
            config.keep(key, "weight_decay", float(config.values[key]))
        elif key.startswith(f"optimizer_config.{name}.") and not key.endswith("bias_correction"):
            config.refuse(key, "finetune's AdamW has PyTorch's betas and epsilon")
        else:
            config.ignore(key, "is what PyTorch does, or belongs to another optimizer")


def _schedule(config: ConfigReader) -> None:
    keys = [key for key in config.values if key.startswith("lr_schedule.")]
    if not keys:
        return
    arguments, steps = list(config.value("lr_schedule.arguments", [])), config.settings.get("max_steps")
    warmup = int(config.value("lr_schedule.warmup", 0))
    is_cosine = config.value("lr_schedule.name") == "cosine_decay" and len(arguments) in (2, 3)
    low_rates = (*arguments[2:], config.value("lr_schedule.warmup_init", 0))
    is_supported = is_cosine and all(rate <= arguments[0] / 50 for rate in low_rates)
    if not is_supported or steps is None or not steps <= arguments[1] + warmup <= steps + warmup:
        for key in keys:
            config.refuse(key, "only a cosine over all steps to about zero is carried over", "lr_scheduler_type")
        return
    late_steps = arguments[1] + warmup - steps
    note = f"there the cosine would end {late_steps:g} steps after the run; here it ends with the run" if late_steps else ""
    config.keep("lr_schedule.name", "lr_scheduler_type", "cosine", note)
    config.keep("lr_schedule.arguments", "learning_rate", float(arguments[0]))
    config.keep("lr_schedule.warmup", "warmup_steps", warmup)
    config.ignore("lr_schedule.warmup_init", "the warmup starts at zero")


def _data(config: ConfigReader) -> None:
    data = config.value("data")
    if "dataset.path" in config.overrides or data is None:
        if data is not None:
            config.ignore("data", "replaced by the override dataset.path")
    elif (folder := Path(str(data)).expanduser()).is_dir() or str(data).startswith(("/", ".", "~")) or str(data).endswith("/"):
        config.keep("data", "dataset.path", str(folder / "train.jsonl"))
        if (folder / "valid.jsonl").is_file():
            config.settings["dataset.eval_path"] = str(folder / "valid.jsonl")
            config.keys_by_setting["dataset.eval_path"] = "data"
    else:
        config.keep("data", "dataset.path", str(data))
    _rows(config)


def _rows(config: ConfigReader) -> None:
    """Format and columns by mlx-lm's order: prompt and completion, which it writes with the chat template; messages; text."""
    features = {name: f"hf_dataset.{name}_feature" for name in ("prompt", "completion", "chat", "text")}
    if config.is_replaced("dataset.path", features.values()):
        return
    if config.keys_by_setting.get("dataset.path", "").startswith("hf_dataset."):
        config.assume("dataset.split", "train[:80%]")
        config.assume("dataset.eval_split", "train[-10%:]")
    names = {name: str(config.value(key, _COLUMNS[name])) for name, key in features.items()}
    present = first_columns(Path(str(config.settings.get("dataset.path"))))
    named = present or {names[name] for name, key in features.items() if key in config.values}
    if {names["prompt"], names["completion"]} <= named:
        columns = {"instruction": names["prompt"], "output": names["completion"]}
        config.settings["dataset.format"] = "alpaca"
        if unread := sorted(({"input", "system", "history"} & present) - set(columns.values())):
            config.settings["dataset.ignore_columns"] = unread
    else:
        pairs = (("messages", "chat"), ("text", "text"))
        columns = next(({field: names[name]} for field, name in pairs if names[name] in named), {})
        columns = {field: column for field, column in columns.items() if field != column}
        if not named:
            config.notes.append(_COMPLETIONS_NOTE)
    if columns:
        config.settings["dataset.columns"] = columns
    for key in features.values():
        config.share(key, f"dataset.columns {columns}")


TOOL = Tool("mlx-lm", "lora_parameters.rank lora_parameters.keys fine_tune_type iters", KEYS, DEFAULTS, finish, nested=True)
