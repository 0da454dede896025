"""Keys that several tools share, most of them transformers' TrainingArguments, and readers of keys that combine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from finetune.files import parse_json
from finetune.recipe.foreign import common
from finetune.recipe.foreign.rules import ConfigReader, Ignore, Read, Refuse, Rule, as_list, each, is_off, kept

_T = TypeVar("_T")
#: transformers' TrainingArguments that mean the same in every tool that has them.
TRAINING_ARGUMENTS: dict[str, Rule] = {
    **kept("output_dir seed lr_scheduler_type per_device_eval_batch_size dataloader_num_workers save_total_limit"),
    **kept("learning_rate num_train_epochs weight_decay max_grad_norm", float),
    **each(Read(), """
        max_steps warmup_ratio warmup_steps optim per_device_train_batch_size gradient_accumulation_steps eval_steps
        save_steps eval_strategy evaluation_strategy save_strategy report_to bf16 fp16 pure_bf16 do_train do_predict
    """),
    **each(common.MEMORY, """
        gradient_checkpointing gradient_checkpointing_kwargs eval_accumulation_steps auto_find_batch_size
    """),
    **each(common.KERNELS, "torch_compile torch_compile_backend torch_compile_mode tf32 use_liger_kernel"),
    **each(common.EVERY_STEP, """
        logging_steps logging_strategy logging_first_step logging_dir disable_tqdm log_level include_num_input_tokens_seen
        include_tokens_per_second
    """),
    **each(common.GPUS, "ddp_timeout ddp_find_unused_parameters ddp_backend local_rank deepspeed fsdp fsdp_config"),
    **each(common.PROCESS, """
        dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers remove_unused_columns
        length_column_name full_determinism
    """),
    **each(common.UPLOAD, "push_to_hub hub_model_id hub_strategy hub_private_repo"),
    **each(Ignore("the held-out loss is the measure"), "metric_for_best_model greater_is_better"),
    **each(common.GENERATION, "predict_with_generate per_device_predict_batch_size"),
    "plot_loss": Ignore("the page draws the loss"), "run_name": common.TRACKERS,
    "overwrite_output_dir": Ignore("a name that is taken gets -2; nothing is overwritten"),
    "save_only_model": Ignore("checkpoints can always be resumed"),
    "save_safetensors": Ignore("safetensors are always written"),
    "do_eval": Ignore("held-out rows are evaluated where there are some"),
    "group_by_length": Ignore("changes the order of rows only"), "data_seed": Ignore("seed is the seed of everything random"),
    "hub_token": common.SECRET, "resume_from_checkpoint": common.FROM_CHECKPOINT,
    "load_best_model_at_end": Ignore("see `finetune recipes keys` for what is kept of a run"), "eval_on_start": common.STEPS,
    "eval_delay": common.STEPS, "neftune_noise_alpha": Refuse("NEFTune's noise is not trained with here"),
    "label_smoothing_factor": Refuse("label smoothing changes the loss"),
    "lr_scheduler_kwargs": Refuse("changes the schedule"), "adam_beta1": Refuse("finetune's AdamW has beta1 0.9", (0.9,)),
    "adam_beta2": Refuse("finetune's AdamW has beta2 0.999", (0.999,)),
    "adam_epsilon": Refuse("finetune's AdamW has epsilon 1e-8", (1e-8,)), "optim_args": Refuse("changes the optimizer"),
    "average_tokens_across_devices": Ignore("losses are averaged over all trained tokens of a step"),
}  # fmt: skip

#: What TrainingArguments do when a key is absent.
TRAINING_DEFAULTS: dict[str, Any] = {
    "num_train_epochs": 3.0, "lr_scheduler_type": "linear", "warmup_ratio": 0.0, "weight_decay": 0.0,
    "max_grad_norm": 1.0, "optim": "adamw_torch_fused", "seed": 42,
}  # fmt: skip


def read_training_arguments(config: ConfigReader) -> None:
    """The TrainingArguments that combine with others."""
    read_batch(config, "per_device_train_batch_size", "gradient_accumulation_steps", 8)
    read_optimizer(config, "optim")
    read_schedule(config)


def read_schedule(config: ConfigReader) -> None:
    """Steps, warm-up, intervals, precision and trackers, which have the same keys in Axolotl."""
    _purpose(config)
    read_steps(config)
    read_warmup(config)
    read_intervals(config)
    read_dtype(config)
    if "report_to" in config.values:
        read_trackers(config)


def _purpose(config: ConfigReader) -> None:
    """Refuse a file that evaluates or predicts and does not train."""
    if config.value("do_train") is False or ("do_train" not in config.values and config.is_on("do_predict")):
        key = "do_train" if "do_train" in config.values else "do_predict"
        config.refuse(key, "this file evaluates or predicts, it does not train; do_train: true trains with its settings")
    config.ignore("do_train", "`finetune run` trains")
    config.ignore("do_predict", common.GENERATION.reason)


def read_batch(config: ConfigReader, micro_key: str, steps_key: str, micro_batch: int = 1, accumulation: int = 1) -> None:
    """The effective batch: micro-batch x gradient accumulation x processes, which the plan preserves."""
    world_size = int(config.overrides.get("launch.num_processes", 1))
    micro_batch, accumulation = int(config.value(micro_key, micro_batch)), int(config.value(steps_key, accumulation))
    if {"effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"} & set(config.overrides):
        for key in (micro_key, steps_key):
            config.ignore(key, "replaced by an override")
        return
    batch_size = micro_batch * accumulation * world_size
    if micro_key in config.values:
        config.keep(micro_key, "effective_batch_size", batch_size)
    else:
        config.assume("effective_batch_size", batch_size)
        config.keys_by_setting["effective_batch_size"] = steps_key
    config.share(steps_key, f"effective_batch_size {micro_batch} x {accumulation} x {world_size} = {batch_size}")


def read_steps(config: ConfigReader, key: str = "max_steps") -> None:
    """`max_steps`; -1 and 0 mean that it is not set."""
    if config.value(key, 0) > 0:
        config.keep(key, "max_steps", config.value(key))
    else:
        config.ignore(key, "is not set")


def read_warmup(config: ConfigReader) -> None:
    """`warmup_steps` over `warmup_ratio`; a step count below one is a share of the steps."""
    steps = config.value("warmup_steps")
    if isinstance(steps, float) and 0 < steps < 1:
        config.keep("warmup_steps", "warmup_ratio", steps)
    elif steps:
        config.keep("warmup_steps", "warmup_steps", int(steps))
    else:
        config.ignore("warmup_steps", "is not set: warmup_ratio counts")
    if steps:
        config.ignore("warmup_ratio", "warmup_steps is set")
    else:
        config.keep("warmup_ratio", "warmup_ratio", config.value("warmup_ratio"))


def read_intervals(config: ConfigReader) -> None:
    """How often to evaluate and to save: whole numbers of steps are carried over, the plan replaces shares of a run."""
    for event, strategy_keys in (("eval", ("eval_strategy", "evaluation_strategy")), ("save", ("save_strategy",))):
        interval = config.value(f"{event}_steps")
        strategy = next((config.value(name) for name in strategy_keys if name in config.values), None)
        if isinstance(interval, int) and strategy in (None, "steps"):
            config.keep(f"{event}_steps", f"{event}_steps", interval)
        else:
            config.ignore(f"{event}_steps", common.STEPS.reason)
        for name in strategy_keys:
            config.ignore(name, f"{event}_steps counts" if strategy == "steps" else common.STEPS.reason)


def read_dtype(config: ConfigReader) -> None:
    """`bf16` and `fp16`, with `auto` for the GPU's best."""
    for key in ("bf16", "pure_bf16", "fp16", "bfloat16", "float16"):
        if config.value(key) is True:
            config.keep(key, "dtype", "float16" if key in ("fp16", "float16") else "bfloat16")
        else:
            config.ignore(key, "the plan chooses the GPU's dtype" if config.value(key) == "auto" else "is off")


def read_trackers(config: ConfigReader) -> None:
    """`report_to`: none, one or several trackers; those that finetune doesn't have are left out."""
    names = [name for name in as_list(config.value("report_to")) if not is_off(name)]
    supported = [name for name in names if name in ("tensorboard", "wandb", "trackio")]
    note = f"{', '.join(set(names) - set(supported))} is left out" if set(names) - set(supported) else ""
    if supported or not note:
        config.keep("report_to", "report_to", supported, note)
    else:
        config.ignore("report_to", f"{note}: finetune logs to tensorboard, wandb or trackio")


#: PEFT's layers where none are named, by the model's name; all others have q_proj and v_proj. PEFT 0.21.2, 2026-08:
#: TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.
_PEFT_TARGETS = {
    r"phi-(1|2)(?!\d)": ["q_proj", "v_proj", "fc1", "fc2"], r"nemotron-?h": ["q_proj", "k_proj", "v_proj", "o_proj"],
    r"falcon-(7b|40b|180b|rw)|pythia|gpt-?neox|bloom": ["query_key_value"], r"gpt-?2|starcoder(?!2)": ["c_attn"],
    r"^mpt-": ["Wqkv"], r"codegen": ["qkv_proj"],
}  # fmt: skip


def for_model(table: Mapping[str, _T], model: str, default: _T) -> _T:
    """The value of the first pattern that a model's name, without its account, has."""
    name = model.rstrip("/").split("/")[-1]
    return next((value for pattern, value in table.items() if re.search(pattern, name, re.I)), default)


def assume_peft_targets(config: ConfigReader, model: str) -> None:
    """PEFT's default layers for the model."""
    config.assume("target_modules", for_model(_PEFT_TARGETS, model, ["q_proj", "v_proj"]))


def read_targets(config: ConfigReader, key: str) -> None:
    """Layers with an adapter; `all` is every linear layer."""
    names = as_list(config.value(key))
    everything = names in (["all"], ["all-linear"], ["all_linear"])
    config.keep(key, "target_modules", "all-linear" if everything else names)


#: Bytes of a local file that is read to see its rows.
LARGEST_FILE = 50_000_000
DIFFERENT_DATASETS = "the datasets have different columns or splits; use datasets with the same ones"


def merge_datasets(datasets: list[dict[str, Any]]) -> dict[str, Any]:
    """Datasets as one, `path` first; empty if they differ in more than their paths and weights.

    If formats differ, each file's is detected from its columns, unless the configuration renames columns.
    """
    paths = [path for dataset in datasets for path in paths_of(dataset)]
    weights = [weight for dataset in datasets for weight in dataset.get("weights", [1.0] * len(paths_of(dataset)))]
    options = [{name: value for name, value in dataset.items() if name not in ("path", "weights")} for dataset in datasets]
    if any(option != options[0] for option in options) and not any("columns" in option for option in options):
        options = [{name: value for name, value in option.items() if name != "format"} for option in options]
    if any(option != options[0] for option in options):
        return {}
    merged = {"path": paths[0] if len(paths) == 1 else paths, **options[0]}
    return {**merged, "weights": weights} if set(weights) != {1.0} else merged


def merged_or_refused(config: ConfigReader, key: str, datasets: list[dict[str, Any] | str]) -> dict[str, Any]:
    """Datasets as one, empty where `key` is refused: for a reason in the place of a dataset, or as they differ."""
    problem = next((dataset for dataset in datasets if isinstance(dataset, str)), None)
    merged = {} if problem else merge_datasets([dataset for dataset in datasets if isinstance(dataset, dict)])
    if not merged:
        config.refuse(key, problem or DIFFERENT_DATASETS, "dataset.path")
    return merged


def first_columns(path: Path) -> set[str]:
    """The columns of the first row of a small local JSON file; none if it can't be read."""
    if not path.is_file() or path.stat().st_size > LARGEST_FILE:
        return set()
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.readline() if path.suffix == ".jsonl" else file.read()
        rows = parse_json(text)
    except ValueError:
        return set()
    row = rows[0] if isinstance(rows, list) and rows else rows
    return set(row) if isinstance(row, dict) else set()


def paths_of(dataset: dict[str, Any]) -> list[str]:
    """The paths of a dataset, one or several."""
    return [dataset["path"]] if isinstance(dataset["path"], str) else list(dataset["path"])


#: Names of chat templates -> models that have that template of their own, and of these those that surely have it (instruct).
_TEMPLATES = {
    r"llama2(_zh)?": (r"llama-?2", r"chat"), r"llama3|llama3_2_vision": (r"llama-?3", r"instruct"),
    r"llama4": (r"llama-?4", r""), r"qwen|qwen_25|qwen2?5?|qwen2\.5": (r"qwen(1\.5|2|2\.5)-", r""),
    r"qwen2(_5)?_vl": (r"qwen2(\.5)?-vl", r""), r"qwen3_vl(_nothink)?": (r"qwen3-vl", r""),
    r"qwen3(_nothink)?": (r"qwen3(?!\.|-vl)", r""), r"qwen3_5(_nothink)?|qwen3\.5": (r"qwen3\.5", r""),
    r"gemma4(_unified)?n?": (r"gemma-?4", r"-it"), r"gemma3n?": (r"gemma-?3", r"-it"), r"gemma2?(_text)?": (r"gemma", r"-it"),
    r"mi(ni)?stral.*|magistral.*": (r"mi[nx]?i?stral|mixtral|magistral", r"instruct|magistral"),
    r"pixtral": (r"pixtral", r""), r"phi_?(3|35|4)(_small|_mini)?": (r"phi-?[34]", r""), r"deepseek.*": (r"deepseek", r""),
    r"yi": (r"^yi-", r"chat"), r"glm_?4.*": (r"glm-?4", r""), r"gpt(_oss|oss)?": (r"gpt-oss", r""),
    r"granite.*": (r"granite", r"instruct"), r"cohere|command_?.*": (r"command|aya", r""), r"aya": (r"aya", r""),
    r"falcon_h1": (r"falcon-h1", r"instruct"), r"falcon": (r"falcon", r"instruct"), r"jamba": (r"jamba", r""),
    r"nemotron_h": (r"nemotron-?h", r"instruct|chat"), r"llava": (r"llava", r""), r"moss_vl": (r"moss-vl", r""),
    r"intern2?": (r"internlm2?", r"chat"), r"smollm2?": (r"smollm", r"instruct"), r"exaone.*": (r"exaone", r""),
    r"olmo.*": (r"olmo", r"instruct"), r"chatml": (r"hermes|smollm.*instruct|dolphin", r""), r"zephyr": (r"zephyr", r""),
    r"vicuna": (r"vicuna", r""),
}  # fmt: skip
_BASE_NOTE = "{model} may have no template of its own: then the run stops before training, and chat_template names a file"
_PLAIN_NOTE = "there nothing is written around prompts and answers; plain writes ### User and ### Assistant"


def own_template_note(name: str, model: str) -> str | None:
    """None if the chat template `name` is not the model's own, else what to say of it: mostly nothing."""
    if re.fullmatch(r"tokenizer_default(_fallback_.*)?", name):
        return ""
    families = dict(patterns for template, patterns in _TEMPLATES.items() if re.fullmatch(template, name))
    instruct = for_model(families, model, None)
    return None if instruct is None else for_model({instruct: ""}, model, _BASE_NOTE.format(model=model))


def read_template(config: ConfigReader, key: str, model: str) -> None:
    """A chat template by name: ignored if it is the model's own, otherwise refused."""
    name = str(config.value(key))
    if name in ("empty", "plain"):
        config.keep(key, "chat_template", "plain", _PLAIN_NOTE)
    elif name.endswith((".jinja", ".jinja2", ".j2")):
        config.keep(key, "chat_template", name)
    elif (note := own_template_note(name, model)) is not None:
        config.ignore(key, f"the model's own chat template is used, which {name} is", note)
    else:
        config.refuse(
            key, f"not the template of {model}, judging by its name; chat_template=null uses the model's own", "chat_template"
        )


_EIGHT_BIT_NOTE = "the 8-bit states are bitsandbytes' here"
#: Optimizers of other tools that are AdamW in another implementation -> ours, and the difference.
_OPTIMIZERS = {
    "adamw_torch_8bit": ("adamw_8bit", f"{_EIGHT_BIT_NOTE}, torchao's there"),
    "adamw_torch_4bit": ("adamw_8bit", f"{_EIGHT_BIT_NOTE}, torchao's of 4 bits there"),
    "adamw_apex_fused": ("adamw_torch_fused", ""), "adamw_anyprecision": ("adamw_torch", ""),
    "adamw_torch_xla": ("adamw_torch", ""), "adamw_torch_npu_fused": ("adamw_torch_fused", ""),
}  # fmt: skip


def read_optimizer(config: ConfigReader, key: str) -> None:
    """The optimizer by its name in transformers; another implementation of AdamW is ours, with a note."""
    if key in config.values:
        name = str(config.value(key)).removeprefix("OptimizerNames.").lower()
        config.keep(key, "optim", *_OPTIMIZERS.get(name, (name, "")))
