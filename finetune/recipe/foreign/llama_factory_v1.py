"""LLaMA-Factory's v1 layout: `peft_config`, `train_dataset` and other sections in place of `finetuning_type` and `dataset`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.recipe.foreign import common
from finetune.recipe.foreign.llama_factory import count_rows
from finetune.recipe.foreign.rules import ConfigReader, Ignore, Keep, Read, Refuse, Rule, Tool, each, kept
from finetune.recipe.foreign.shared import merged_or_refused, read_dtype, read_steps, read_targets
from finetune.recipe.yaml import parse
from finetune.settings.base_formats import BITS_16, switches

_P, _Q = "peft_config.", "quant_config."
_EXPORT = Ignore("for exporting: `finetune merge` writes the model")

KEYS: dict[str, Rule] = {
    **each(common.KERNELS, "flash_attn kernel_config.* kernel_config quant_config.compute_dtype"),
    **each(common.GPUS, "dist_config.* dist_config dp_size cp_size cp_mode mp_replicate_size mp_shard_size dist_timeout"),
    **each(Read(), """
        peft_config.name peft_config.target_modules quant_config.quantization_bit train_dataset micro_batch_size
        global_batch_size max_steps bf16
    """),
    **each(_EXPORT, """
        peft_config.export_dir peft_config.export_size peft_config.export_hub_model_id peft_config.infer_dtype
        peft_config.export_legacy_format
    """),
    **kept("output_dir seed save_steps save_total_limit"),
    **kept("learning_rate num_train_epochs max_grad_norm", float),
    **each(common.PREFERENCE, "pref_loss pref_beta pref_ftx simpo_gamma dpo_label_smoothing ld_alpha"),
    **each(common.PROCESS, "batching_workers full_determinism save_ckpt_as_hf"),
    **each(common.GENERATION, "sample_backend max_new_tokens"),
    "model": Keep("model_name_or_path"), "model_class": Refuse("finetune trains causal language models", ("llm",)),
    "custom_chat_template": Refuse("save the template as a file", lifted_by="chat_template"),
    "trust_remote_code": common.REMOTE_CODE,
    "init_config.name": Refuse("the model is loaded as it is", ("init_on_rank0", "init_on_meta", "init_on_default")),
    "init_config.*": Refuse("the model is loaded as it is"), f"{_P}r": Keep("lora_r"),
    f"{_P}lora_alpha": Keep("lora_alpha", float), f"{_P}lora_dropout": Keep("lora_dropout", float),
    f"{_P}use_rslora": Keep("use_rslora"), f"{_P}use_dora": Keep("use_dora"), f"{_P}modules_to_save": common.WHOLE_MODULES,
    f"{_P}adapter_name_or_path": common.OTHER_ADAPTER, f"{_P}*": common.NOT_TRAINED,
    f"{_Q}name": Refuse("only bitsandbytes quantises while loading", ("bnb", "auto")),
    f"{_Q}double_quantization": Refuse("4 bits are quantised twice", (True,)),
    f"{_Q}quantization_type": Refuse("4 bits are NF4", ("nf4",)),
    "eval_dataset": Ignore("is not read there, either; set dataset.eval_path"), "cutoff_len": Keep("max_length"),
    "batching_strategy": Refuse("a step is a number of rows", ("normal", "padding_free")),
    "enable_activation_checkpointing": common.MEMORY,
    "optim_config.*": Refuse("finetune trains with AdamW; remove the section", lifted_by="optim"),
    "lr_scheduler_config.*": Refuse("changes the schedule", lifted_by="lr_scheduler_type"),
    "resume_from_checkpoint": common.FROM_CHECKPOINT, "save_epochs": common.STEPS, "logging_steps": common.EVERY_STEP,
}  # fmt: skip

#: The schedule and the weight decay are those of `torch.optim.AdamW` without a scheduler, which v1 uses.
DEFAULTS: dict[str, Any] = {
    "num_train_epochs": 3.0, "lr_scheduler_type": "constant", "warmup_ratio": 0.0, "weight_decay": 0.01,
    "max_grad_norm": 1.0, "optim": "adamw_torch", "seed": 42, "learning_rate": 1e-4, "lora_r": 8, "lora_alpha": 16.0,
    "lora_dropout": 0.05, "target_modules": "all-linear", "max_length": 2048, "excess_length": "truncate",
    **switches(BITS_16), "packing": False, "train_on_inputs": False,
}  # fmt: skip

_SEVERAL_ANSWERS = "a conversation with several answers is one row here; there it is a row for each answer"
_CONVERTERS = {"alpaca": "alpaca", "sharegpt": "sharegpt", None: "messages"}


def finish(config: ConfigReader) -> None:
    """Keys of the v1 layout that combine."""
    _batch(config)
    read_steps(config)
    read_dtype(config)
    if f"{_P}name" in config.values:
        config.require_lora(f"{_P}name", "lora")
    else:
        config.refuse(f"{_P}name", "trains all parameters")
    if f"{_P}target_modules" in config.values:
        read_targets(config, f"{_P}target_modules")
    if any(key.startswith(_Q) for key in config.values):
        _quantisation(config)
    _datasets(config)


def _batch(config: ConfigReader) -> None:
    """v1's global batch counts all processes; without it each process takes one micro-batch."""
    micro_batch = int(config.value("micro_batch_size", 1)) * int(config.overrides.get("launch.num_processes", 1))
    if "global_batch_size" in config.values:
        config.keep("global_batch_size", "effective_batch_size", config.value("global_batch_size"))
        config.ignore("micro_batch_size", "global_batch_size counts; the plan chooses the micro-batch")
    elif "micro_batch_size" in config.values:
        config.keep("micro_batch_size", "effective_batch_size", micro_batch)
    else:
        config.assume("effective_batch_size", micro_batch)


def _quantisation(config: ConfigReader) -> None:
    bits = config.value(f"{_Q}quantization_bit", 4 if config.value(f"{_Q}name") == "bnb" else None)
    if bits in (4, 8) and f"{_Q}quantization_bit" in config.values:
        config.keep(f"{_Q}quantization_bit", f"load_in_{bits}bit", True)
    elif bits == 4:
        config.assume("load_in_4bit", True)
    elif bits is not None:
        config.refuse(f"{_Q}quantization_bit", "4 and 8 bits are supported")


def _datasets(config: ConfigReader) -> None:
    source = config.value("train_dataset")
    if source is None or config.is_replaced("dataset.path", ["train_dataset"]):
        return
    if not str(source).endswith((".yaml", ".yml")):
        config.keep("train_dataset", "dataset.path", str(source), _SEVERAL_ANSWERS)
        return
    folders = (Path(), config.folder, *config.folder.absolute().parents[:3])
    file = next((folder / str(source) for folder in folders if (folder / str(source)).is_file()), None)
    if file is None:
        config.refuse("train_dataset", "the list of datasets is not here", "dataset.path")
        return
    entries = parse(file.read_text(encoding="utf-8"), str(file), yaml_1_1=True).values
    datasets = [_dataset_settings(name, entry, file.parent) for name, entry in entries.items()]
    for setting, value in reversed(merged_or_refused(config, "train_dataset", datasets).items()):
        config.keep("train_dataset", f"dataset.{setting}", value, _SEVERAL_ANSWERS)


def _dataset_settings(name: str, entry: Any, folder: Path) -> dict[str, Any] | str:
    """A dataset of v1's list as settings without the prefix `dataset.`, or the reason why it can't be used."""
    if not isinstance(entry, dict) or "path" not in entry:
        return f"{name} has no path"
    unknown = set(entry) - {"path", "source", "converter", "split", "size", "weight", "streaming"}
    if unknown or entry.get("converter") not in _CONVERTERS:
        return f"{name} has {', '.join(sorted(unknown)) or 'converter ' + str(entry['converter'])}, which finetune doesn't read"
    path = str(entry["path"])
    if entry.get("source", "hf_hub") != "hf_hub" and not Path(path).exists():
        path = next((str(base / path) for base in (folder, folder.parent) if (base / path).exists()), path)
    settings: dict[str, Any] = {"path": path, "format": _CONVERTERS[entry.get("converter")]}
    if entry.get("size") is not None:
        if not (row_count := count_rows(Path(path))):
            return f"{name} has size {entry['size']}, and its rows can't be counted here; use dataset.weights"
        settings["weights"] = [entry["size"] / row_count * float(entry.get("weight") or 1.0)]
    elif entry.get("weight") is not None:
        settings["weights"] = [float(entry["weight"])]
    return {**settings, **({"split": entry["split"]} if entry.get("split", "train") != "train" else {})}


TOOL = Tool(
    "LLaMA-Factory v1",
    "peft_config.name train_dataset dist_config.name",
    KEYS, DEFAULTS, finish, nested=True, interpolates=True,
)  # fmt: skip
