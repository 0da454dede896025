"""Keys that several tools share, most of them transformers' TrainingArguments, and what they mean together."""

from __future__ import annotations

import re
from typing import Any

from finetune.recipe.foreign.rules import Ignore, Keep, Read, Reading, Refuse, Rule, is_off, listed

MEMORY = Ignore("does not change what is learnt: the plan chooses what fits the card")
KERNELS = Ignore("kernels do not change what is learnt: the plan chooses the fastest of the card")
EVERY_STEP = Ignore("every step is logged")
PLACES = Ignore("the plan chooses how often; set eval_steps or save_steps")
TRACKERS = Ignore("set report_to to log to wandb, tensorboard or trackio")
UPLOAD = Ignore("nothing is uploaded: `finetune merge` writes the model")
CARDS = Ignore("for several cards: set launch.num_processes and launch.strategy")
PROCESS = Ignore("of the other tool's own process")
DATASET_CACHE = Ignore("tokenised rows are kept in the run directory")
GENERATION = Ignore("for generation, not for training")
PREFERENCE = Ignore("for preference training, which this is not")
NOT_TRAINED = Refuse("this is not trained by finetune")
SECRET = Refuse("secrets don't belong in a file: `hf auth login`, or set HF_TOKEN")

#: transformers' TrainingArguments that mean the same in every tool that hands them on.
TRAINING_ARGUMENTS: dict[str, Rule] = {
    "output_dir": Keep("output_dir"), "seed": Keep("seed"), "learning_rate": Keep("learning_rate", float),
    "num_train_epochs": Keep("num_train_epochs", float), "max_steps": Read(), "lr_scheduler_type": Keep("lr_scheduler_type"),
    "warmup_ratio": Read(), "warmup_steps": Read(), "weight_decay": Keep("weight_decay", float),
    "max_grad_norm": Keep("max_grad_norm", float), "optim": Keep("optim"),
    "per_device_train_batch_size": Read(), "gradient_accumulation_steps": Read(),
    "per_device_eval_batch_size": Keep("per_device_eval_batch_size"), "dataloader_num_workers": Keep("dataloader_num_workers"),
    "eval_steps": Read(), "save_steps": Read(), "eval_strategy": Read(), "evaluation_strategy": Read(), "save_strategy": Read(),
    "save_total_limit": Keep("save_total_limit"), "report_to": Read(), "bf16": Read(), "fp16": Read(), "pure_bf16": Read(),
    "gradient_checkpointing": MEMORY, "gradient_checkpointing_kwargs": MEMORY, "torch_compile": KERNELS,
    "torch_compile_backend": KERNELS, "torch_compile_mode": KERNELS, "tf32": KERNELS, "use_liger_kernel": KERNELS,
    "logging_steps": EVERY_STEP, "logging_strategy": EVERY_STEP, "logging_first_step": EVERY_STEP, "logging_dir": EVERY_STEP,
    "disable_tqdm": EVERY_STEP, "log_level": EVERY_STEP, "include_num_input_tokens_seen": EVERY_STEP,
    "include_tokens_per_second": EVERY_STEP, "plot_loss": Ignore("the page draws the loss"), "run_name": TRACKERS,
    "overwrite_output_dir": Ignore("a name that is taken gets -2; nothing is overwritten"),
    "save_only_model": Ignore("checkpoints can always be resumed"),
    "save_safetensors": Ignore("safetensors are always written"),
    "do_train": Ignore("`finetune run` trains"), "do_eval": Ignore("held-out rows are evaluated where there are some"),
    "do_predict": GENERATION, "predict_with_generate": GENERATION, "per_device_predict_batch_size": GENERATION,
    "ddp_timeout": CARDS, "ddp_find_unused_parameters": CARDS, "ddp_backend": CARDS, "local_rank": CARDS, "deepspeed": CARDS,
    "fsdp": CARDS, "fsdp_config": CARDS, "dataloader_pin_memory": PROCESS, "dataloader_prefetch_factor": PROCESS,
    "dataloader_persistent_workers": PROCESS, "remove_unused_columns": PROCESS,
    "group_by_length": Ignore("changes the order of rows only"),
    "length_column_name": PROCESS, "data_seed": Ignore("seed is the seed of everything random"), "full_determinism": PROCESS,
    "push_to_hub": UPLOAD, "hub_model_id": UPLOAD, "hub_strategy": UPLOAD, "hub_private_repo": UPLOAD, "hub_token": SECRET,
    "resume_from_checkpoint": Refuse("a new run starts from the beginning; `finetune resume RUN` goes on", ("auto",)),
    "load_best_model_at_end": Ignore("see `finetune recipes keys` for what is kept of a run"),
    "metric_for_best_model": Ignore("the held-out loss is the measure"),
    "greater_is_better": Ignore("the held-out loss is the measure"),
    "eval_on_start": PLACES, "eval_delay": PLACES, "eval_accumulation_steps": MEMORY, "auto_find_batch_size": MEMORY,
    "neftune_noise_alpha": Refuse("NEFTune's noise is not trained with here"),
    "label_smoothing_factor": Refuse("label smoothing changes the loss"), "lr_scheduler_kwargs": Refuse("changes the schedule"),
    "adam_beta1": Refuse("finetune's AdamW has beta1 0.9", (0.9,)),
    "adam_beta2": Refuse("finetune's AdamW has beta2 0.999", (0.999,)),
    "adam_epsilon": Refuse("finetune's AdamW has epsilon 1e-8", (1e-8,)), "optim_args": Refuse("changes the optimizer"),
    "average_tokens_across_devices": Ignore("losses are averaged over all trained tokens of a step"),
}  # fmt: skip

#: What TrainingArguments do when a key is absent.
TRAINING_DEFAULTS: dict[str, Any] = {
    "num_train_epochs": 3.0, "lr_scheduler_type": "linear", "warmup_ratio": 0.0, "weight_decay": 0.0,
    "max_grad_norm": 1.0, "optim": "adamw_torch_fused", "seed": 42,
}  # fmt: skip


def read_training_arguments(reading: Reading, micro: int = 8) -> None:
    """The TrainingArguments that mean something only together."""
    read_batch(reading, "per_device_train_batch_size", "gradient_accumulation_steps", micro)
    read_steps(reading)
    read_warmup(reading)
    read_places(reading)
    read_dtype(reading)
    if "report_to" in reading.values:
        read_trackers(reading)


def read_batch(reading: Reading, micro_key: str, steps_key: str, micro: int = 1, steps: int = 1) -> None:
    """The effective batch: micro-batch x gradient accumulation x processes, which is what the plan keeps."""
    world = int(reading.given.get("launch.num_processes", 1))
    micro, steps = int(reading.value(micro_key, micro)), int(reading.value(steps_key, steps))
    if {"effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"} & set(reading.given):
        for key in (micro_key, steps_key):
            reading.ignore(key, "replaced by an override")
        return
    batch = micro * steps * world
    if micro_key in reading.values:
        reading.keep(micro_key, "effective_batch_size", batch)
    else:
        reading.assume("effective_batch_size", batch)
        reading.origin["effective_batch_size"] = steps_key
    reading.share(steps_key, f"effective_batch_size {micro} x {steps} x {world} = {batch}")


def read_steps(reading: Reading) -> None:
    """`max_steps`, where -1 and 0 are: not set."""
    if reading.value("max_steps", 0) > 0:
        reading.keep("max_steps", "max_steps", reading.value("max_steps"))
    else:
        reading.ignore("max_steps", "is not set")


def read_warmup(reading: Reading) -> None:
    """`warmup_steps` over `warmup_ratio`; a step count below one is a share of the steps."""
    steps = reading.value("warmup_steps")
    if isinstance(steps, float) and 0 < steps < 1:
        reading.keep("warmup_steps", "warmup_ratio", steps)
    elif steps:
        reading.keep("warmup_steps", "warmup_steps", int(steps))
    else:
        reading.ignore("warmup_steps", "is not set: warmup_ratio counts")
    if steps:
        reading.ignore("warmup_ratio", "warmup_steps is set")
    elif "warmup_ratio" in reading.values:
        reading.keep("warmup_ratio", "warmup_ratio", reading.value("warmup_ratio"))


def read_places(reading: Reading) -> None:
    """How often to evaluate and to save: whole numbers of steps are carried over, shares of a run are the plan's choice."""
    for what, names in (("eval", ("eval_strategy", "evaluation_strategy")), ("save", ("save_strategy",))):
        steps, strategy = (
            reading.value(f"{what}_steps"),
            next((reading.value(name) for name in names if name in reading.values), None),
        )
        if f"{what}_steps" in reading.values:
            if isinstance(steps, int) and strategy in (None, "steps"):
                reading.keep(f"{what}_steps", f"{what}_steps", steps)
            else:
                reading.ignore(f"{what}_steps", PLACES.why)
        for name in names:
            reading.ignore(name, f"{what}_steps counts" if strategy == "steps" else PLACES.why)


def read_dtype(reading: Reading) -> None:
    """`bf16` and `fp16`, with `auto` for the card's best."""
    for key, dtype in (
        ("bf16", "bfloat16"),
        ("pure_bf16", "bfloat16"),
        ("fp16", "float16"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
    ):
        if reading.value(key) is True:
            reading.keep(key, "dtype", dtype)
        else:
            reading.ignore(key, "the plan chooses the dtype of the card" if reading.value(key) == "auto" else "is off")


def read_trackers(reading: Reading) -> None:
    """`report_to`: none, one or several; those that finetune doesn't have are left out."""
    named = [name for name in listed(reading.value("report_to")) if not is_off(name)]
    known = [name for name in named if name in ("tensorboard", "wandb", "trackio")]
    left = f"{', '.join(set(named) - set(known))} is left out" if set(named) - set(known) else ""
    if known or not left:
        reading.keep("report_to", "report_to", known, left)
    else:
        reading.ignore("report_to", f"{left}: finetune logs to tensorboard, wandb or trackio")


def read_targets(reading: Reading, key: str) -> None:
    """Layers with an adapter; `all` is every linear layer, nothing is PEFT's default."""
    if key not in reading.values:
        reading.assume("target_modules", ["q_proj", "v_proj"])
        return
    names = listed(reading.value(key))
    everything = names in (["all"], ["all-linear"], ["all_linear"])
    reading.keep(key, "target_modules", "all-linear" if everything else names)


OF_ONE_KIND = "the datasets have different columns or splits; use those of one kind"


def one_dataset(datasets: list[dict[str, Any]]) -> dict[str, Any]:
    """Datasets as one, `path` first; empty where they differ in more than their paths and weights.

    Where formats differ, each file's is told by its columns, unless these have other names.
    """
    paths = [path for dataset in datasets for path in paths_of(dataset)]
    weights = [weight for dataset in datasets for weight in dataset.get("weights", [1.0] * len(paths_of(dataset)))]
    rest = [{name: value for name, value in dataset.items() if name not in ("path", "weights")} for dataset in datasets]
    if any(each != rest[0] for each in rest) and not any("columns" in each for each in rest):
        rest = [{name: value for name, value in each.items() if name != "format"} for each in rest]
    if any(each != rest[0] for each in rest):
        return {}
    together = {"path": paths[0] if len(paths) == 1 else paths, **rest[0]}
    return {**together, "weights": weights} if set(weights) != {1.0} else together


def paths_of(dataset: dict[str, Any]) -> list[str]:
    """The paths of a dataset, one or several."""
    return [dataset["path"]] if isinstance(dataset["path"], str) else list(dataset["path"])


#: Names of chat templates -> models that have that template of their own.
_TEMPLATES = {
    r"llama2(_zh)?": r"llama-?2.*chat", r"llama3": r"llama-?3.*instruct", r"llama4": r"llama-?4.*instruct",
    r"qwen|qwen_25|qwen2?5?|qwen2\.5": r"qwen(1\.5|2|2\.5)-", r"qwen3(_nothink)?": r"qwen3(?!\.)",
    r"qwen3_5(_nothink)?|qwen3\.5": r"qwen3\.5",
    r"gemma[234n]?(_text|3n|3)?": r"gemma.*-it", r"mi(ni)?stral.*": r"mi[nx]?i?stral.*instruct|mixtral.*instruct",
    r"phi_?(3|35|4)(_small|_mini)?": r"phi-?[34]", r"deepseek.*": r"deepseek", r"yi": r"yi-.*chat", r"glm_?4.*": r"glm-?4",
    r"gpt(_oss|oss)?": r"gpt-oss", r"granite.*": r"granite.*instruct", r"cohere|command_?.*": r"command|aya",
    r"falcon.*": r"falcon.*instruct",
    r"intern2?": r"internlm2?.*chat", r"smollm2?": r"smollm.*instruct", r"exaone.*": r"exaone", r"olmo.*": r"olmo.*instruct",
    r"chatml": r"hermes|smollm.*instruct|dolphin", r"zephyr": r"zephyr", r"vicuna": r"vicuna",
}  # fmt: skip
_OWN = re.compile(r"tokenizer_default(_fallback_.*)?|default")


def read_template(reading: Reading, key: str, model: str) -> None:
    """A chat template by name: the model's own where that is the one, else refused."""
    name = str(reading.value(key))
    if _OWN.fullmatch(name):
        reading.ignore(key, "the model's own chat template is used")
    elif name in ("empty", "plain"):
        reading.keep(key, "chat_template", "plain")
    elif name.endswith((".jinja", ".jinja2", ".j2")):
        reading.keep(key, "chat_template", name)
    elif any(
        re.fullmatch(known, name) and re.search(of, model.rstrip("/").split("/")[-1], re.I) for known, of in _TEMPLATES.items()
    ):
        reading.ignore(key, f"{name} is the template of {model}: the model's own is used")
    else:
        reading.refuse(
            key,
            f"not the template of {model}, as far as its name tells; chat_template=null takes the model's own",
            "chat_template",
        )
