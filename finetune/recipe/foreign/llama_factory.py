"""LLaMA-Factory: its training YAML, with `dataset_info.json` for the datasets' names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.recipe.foreign.rules import Ignore, Keep, Read, Reading, Refuse, Rule, Tool, listed
from finetune.recipe.foreign.shared import (
    CARDS,
    DATASET_CACHE,
    GENERATION,
    KERNELS,
    MEMORY,
    NOT_TRAINED,
    OF_ONE_KIND,
    PREFERENCE,
    PROCESS,
    SECRET,
    TRACKERS,
    TRAINING_ARGUMENTS,
    TRAINING_DEFAULTS,
    one_dataset,
    paths_of,
    read_targets,
    read_template,
    read_training_arguments,
)  # fmt: skip

_IMAGES = Ignore("for images, video or sound; rows are text here")
_OTHER_METHOD = Ignore("of a method that this configuration doesn't use")

KEYS: dict[str, Rule] = {
    **TRAINING_ARGUMENTS,
    # -- model
    "model_name_or_path": Keep("model_name_or_path"),
    "model_revision": Keep("model_revision", lambda name: None if name == "main" else name),
    "adapter_name_or_path": Refuse("in a recipe it is adapter=FOLDER, without the rank and layers, which it has"),
    "trust_remote_code": Ignore("models that transformers knows need no code of the hub; else set it here with model_revision"),
    "cache_dir": Ignore("set HF_HOME"), "use_fast_tokenizer": PROCESS, "low_cpu_mem_usage": MEMORY, "flash_attn": KERNELS,
    "use_unsloth": KERNELS, "enable_liger_kernel": KERNELS, "use_v1_kernels": KERNELS, "use_unsloth_gc": MEMORY,
    "disable_gradient_checkpointing": MEMORY, "use_reentrant_gc": MEMORY, "offload_folder": MEMORY,
    "resize_vocab": Refuse("new tokens are not trained"), "add_tokens": Refuse("new tokens are not trained"),
    "add_special_tokens": Refuse("new tokens are not trained"),
    "new_special_tokens_config": Refuse("new tokens are not trained"),
    "split_special_tokens": Refuse("special tokens are kept whole"), "rope_scaling": Refuse("positions are not rescaled"),
    "shift_attn": Refuse("attention is not shifted"), "mixture_of_depths": NOT_TRAINED, "train_from_scratch": NOT_TRAINED,
    "moe_aux_loss_coef": Refuse("the router's loss is not added"), "upcast_layernorm": KERNELS, "upcast_lmhead_output": KERNELS,
    "hf_hub_token": SECRET, "ms_hub_token": SECRET, "om_hub_token": SECRET, "print_param_status": PROCESS,
    "infer_backend": GENERATION, "infer_dtype": GENERATION, "use_kv_cache": GENERATION,
    "quantization_bit": Read(),
    "quantization_method": Refuse("only bitsandbytes quantises while loading", ("bnb", "bitsandbytes")),
    "quantization_type": Refuse("4 bits are NF4", ("nf4",)),
    "double_quantization": Refuse("4 bits are quantised twice", (True,)),
    "quantization_device_map": CARDS, "fp8": NOT_TRAINED, "fp8_backend": _OTHER_METHOD,
    # -- method
    "stage": Read(), "finetuning_type": Read(), "lora_rank": Keep("lora_r"), "lora_alpha": Keep("lora_alpha"),
    "lora_dropout": Keep("lora_dropout"),
    "lora_target": Read(), "use_rslora": Keep("use_rslora"), "use_dora": Keep("use_dora"), "create_new_adapter": PROCESS,
    "additional_target": Refuse("whole modules are not trained beside adapters"),
    "loraplus_lr_ratio": Refuse("one learning rate for all adapters"),
    "loraplus_lr_embedding": _OTHER_METHOD, "pissa_init": Refuse("adapters start from zero, not from PiSSA"),
    "pissa_iter": _OTHER_METHOD,
    "pissa_convert": _OTHER_METHOD, "use_galore": NOT_TRAINED, "use_apollo": NOT_TRAINED, "use_badam": NOT_TRAINED,
    "use_adam_mini": NOT_TRAINED,
    "use_muon": NOT_TRAINED, "use_dft_loss": NOT_TRAINED, "use_asft_loss": NOT_TRAINED, "use_eaft_loss": NOT_TRAINED,
    "use_llama_pro": NOT_TRAINED,
    "use_mca": NOT_TRAINED, "freeze_trainable_layers": _OTHER_METHOD, "freeze_trainable_modules": _OTHER_METHOD,
    "freeze_vision_tower": _IMAGES, "freeze_multi_modal_projector": _IMAGES, "freeze_language_model": NOT_TRAINED,
    "pref_beta": PREFERENCE, "pref_ftx": PREFERENCE, "pref_loss": PREFERENCE, "ref_model": PREFERENCE,
    "reward_model": PREFERENCE,
    "disable_shuffling": Refuse("rows are shuffled"), "early_stopping_steps": Keep("early_stopping_patience"),
    "compute_accuracy": Ignore("`finetune eval` scores"),
    "include_effective_tokens_per_second": Ignore("tokens per second are always shown"),
    "use_swanlab": TRACKERS, "swanlab_project": TRACKERS, "swanlab_run_name": TRACKERS, "swanlab_mode": TRACKERS,
    # -- data
    "dataset": Read(), "dataset_dir": Read(), "eval_dataset": Read(),
    "val_size": Keep("dataset.test_split_size", lambda size: int(size) if size >= 1 else float(size)),
    "max_samples": Read(), "template": Read(), "cutoff_len": Keep("max_length"), "train_on_prompt": Keep("train_on_inputs"),
    "mask_history": Refuse("every answer of a conversation is learnt"), "packing": Read(), "neat_packing": Read(),
    "tool_format": Refuse("tool calls are written by the model's own template"),
    "default_system": Refuse("no system prompt is added to rows"),
    "enable_thinking": Ignore("thoughts are learnt where rows have them"), "streaming": MEMORY, "buffer_size": MEMORY,
    "mix_strategy": Refuse("datasets are joined", ("concat",)), "interleave_probs": Refuse("datasets are joined"),
    "overwrite_cache": DATASET_CACHE, "preprocessing_batch_size": DATASET_CACHE, "preprocessing_num_workers": DATASET_CACHE,
    "tokenized_path": Refuse("rows tokenised by LLaMA-Factory are not read", lifted_by="dataset.path"),
    "data_shared_file_system": DATASET_CACHE,
    "ignore_pad_token_for_loss": Refuse("padding is never learnt", (True,)), "eval_num_beams": GENERATION,
    "eval_on_each_dataset": PROCESS,
    "media_dir": _IMAGES, "image_max_pixels": _IMAGES, "image_min_pixels": _IMAGES, "video_max_pixels": _IMAGES,
    "video_min_pixels": _IMAGES,
    "video_fps": _IMAGES, "video_maxlen": _IMAGES, "audio_sampling_rate": _IMAGES,
    "max_new_tokens": GENERATION, "max_length": GENERATION, "temperature": GENERATION, "top_p": GENERATION,
    "top_k": GENERATION, "do_sample": GENERATION,
    "num_beams": GENERATION, "repetition_penalty": GENERATION, "ray_run_name": PROCESS, "ray_storage_path": PROCESS,
    "ray_num_workers": CARDS,
    "resources_per_worker": CARDS, "placement_strategy": CARDS, "ray_init_kwargs": PROCESS,
}  # fmt: skip

DEFAULTS: dict[str, Any] = {
    **TRAINING_DEFAULTS, "learning_rate": 5e-5, "lora_r": 8, "lora_dropout": 0.0, "target_modules": "all-linear",
    "max_length": 2048,
    "excess_length": "truncate", "load_in_4bit": False, "load_in_8bit": False, "packing": False,
}  # fmt: skip

#: Columns of LLaMA-Factory's datasets -> our field; the value is its default column.
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_REFUSED_COLUMNS = ("images", "videos", "audios", "chosen", "rejected", "kto_tag")
_ROLES = {
    "user_tag": ("human", "user"), "assistant_tag": ("gpt", "assistant"), "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",), "system_tag": ("system",),
}  # fmt: skip


def finish(reading: Reading) -> None:
    """What LLaMA-Factory's keys mean together."""
    read_training_arguments(reading)
    _method(reading)
    if "lora_target" in reading.values:
        read_targets(reading, "lora_target")
    reading.assume("lora_alpha", 2 * reading.settings.get("lora_r", DEFAULTS["lora_r"]))
    model = str(reading.given.get("model_name_or_path") or reading.value("model_name_or_path", ""))
    if "template" in reading.values:
        read_template(reading, "template", model)
    _packing(reading)
    _datasets(reading)


def _method(reading: Reading) -> None:
    for key, wanted, reason in (
        ("stage", "sft", "finetune trains on answers (sft)"),
        ("finetuning_type", "lora", "finetune trains LoRA adapters"),
    ):
        if reading.value(key, wanted) != wanted:
            reading.refuse(key, reason)
        else:
            reading.ignore(key, "is what finetune does")
    if (bits := reading.value("quantization_bit")) in (4, 8):
        reading.keep("quantization_bit", f"load_in_{bits}bit", True)
    elif bits is not None:
        reading.refuse("quantization_bit", "4 and 8 bits are supported")


def _packing(reading: Reading) -> None:
    neat, packing = reading.is_on("neat_packing"), reading.is_on("packing")
    if "neat_packing" in reading.values:
        reading.keep("neat_packing", "packing", neat or packing)
    if "packing" in reading.values:
        note = (
            "rows of a packed sequence don't see each other here; there they do without neat_packing"
            if packing and not neat
            else ""
        )
        reading.keep("packing", "packing", neat or packing, note)


def _datasets(reading: Reading) -> None:
    if reading.is_replaced("dataset.path", ("dataset", "dataset_dir", "eval_dataset", "max_samples")):
        return
    for key in ("dataset_dir", "eval_dataset", "max_samples"):
        reading.ignore(key, "of the dataset")
    names = listed(reading.value("dataset", []))
    info, folder = _dataset_info(reading)
    if not names:
        return
    rows = [_described(name, info, folder) for name in names]
    if problem := next((row for row in rows if isinstance(row, str)), None):
        reading.refuse("dataset", problem, "dataset.path")
        return
    together = one_dataset([row for row in rows if isinstance(row, dict)])
    if not together:
        reading.refuse("dataset", OF_ONE_KIND, "dataset.path")
        return
    for name, value in reversed(together.items()):
        reading.keep("dataset", f"dataset.{name}", value)
    _eval_dataset(reading, info, folder)
    _max_samples(reading, paths_of(together))
    reading.ignore("dataset_dir", f"dataset_info.json is read from {folder}")


def _eval_dataset(reading: Reading, info: dict[str, Any], folder: Path) -> None:
    if "eval_dataset" not in reading.values:
        return
    rows = [_described(name, info, folder) for name in listed(reading.value("eval_dataset"))]
    if all(isinstance(row, dict) and Path(row["path"]).is_file() for row in rows):
        reading.keep("eval_dataset", "dataset.eval_path", [row["path"] for row in rows if isinstance(row, dict)])
    else:
        reading.refuse("eval_dataset", "is not a local file of dataset_info.json", "dataset.eval_path")


def _max_samples(reading: Reading, paths: list[str]) -> None:
    most = reading.value("max_samples")
    if most is None:
        return
    if len(paths) == 1:
        reading.keep("max_samples", "dataset.max_rows", most)
    elif all((rows := _rows(Path(path))) is not None and rows <= most for path in paths):
        reading.ignore("max_samples", "no dataset has more rows")
    else:
        reading.refuse("max_samples", "is for each dataset there, and for all together here", "dataset.max_rows")


def _rows(path: Path) -> int | None:
    """Rows of a small local file, None where that isn't known."""
    if not path.is_file() or path.stat().st_size > 50_000_000:
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".jsonl":
        return sum(bool(line.strip()) for line in text.splitlines())
    try:
        rows = json.loads(text)
    except ValueError:
        return None
    return len(rows) if isinstance(rows, list) else None


def _dataset_info(reading: Reading) -> tuple[dict[str, Any], Path]:
    """`dataset_info.json` and its folder: `dataset_dir` from here, from the file, or from a folder above the file."""
    folder = Path(str(reading.value("dataset_dir", "data")))
    places = [folder, *(above / folder for above in (reading.folder, *reading.folder.absolute().parents[:3])), reading.folder]
    for place in places:
        try:
            return json.loads((place / "dataset_info.json").read_text(encoding="utf-8")), place
        except (OSError, ValueError):
            continue
    return {}, folder


def _described(name: str, info: dict[str, Any], folder: Path) -> dict[str, Any] | str:
    """A dataset as settings of ours without the prefix `dataset.`, or the reason why it can't be used."""
    entry = info.get(name)
    if not isinstance(entry, dict):
        if Path(name).is_file():
            return {"path": name}
        return f"{name} is not in {folder / 'dataset_info.json'}" + ("" if info else ", which was not found")
    columns, tags = entry.get("columns", {}), entry.get("tags", {})
    if entry.get("ranking") or (bad := [column for column in _REFUSED_COLUMNS if column in columns]):
        return f"{name} is for preferences or images" + ("" if entry.get("ranking") else f" (columns {', '.join(bad)})")
    if columns.get("history"):
        return f"{name} has a history, whose answers LLaMA-Factory learns and finetune reads as context"
    for tag, roles in _ROLES.items():
        if tags.get(tag, roles[0]) not in roles:
            return f"{name} calls a role {tags[tag]}; finetune knows {' and '.join(roles)}"
    described: dict[str, Any] = {"path": str(entry.get("hf_hub_url") or folder / str(entry.get("file_name")))}
    if (wanted := entry.get("num_samples")) is not None:
        rows = _rows(Path(described["path"]))
        if not rows:
            return f"{name} has num_samples {wanted}, and its rows can't be counted here; use dataset.weights"
        described["weights"] = [wanted / rows]
    hub = {"name": entry.get("subset"), "split": entry.get("split")} if entry.get("hf_hub_url") else {}
    return {**described, **{key: value for key, value in hub.items() if value}, **_format(entry, columns, tags)}


def _format(entry: dict[str, Any], columns: dict[str, str], tags: dict[str, str]) -> dict[str, Any]:
    """The format and the columns that don't have the format's own names."""
    if entry.get("formatting", "alpaca") == "alpaca":
        wanted = {ours: columns.get(theirs, ours) for theirs, ours in _ALPACA.items() if theirs in columns or not columns}
        wanted |= {"system": columns["system"]} if columns.get("system") else {}
        if columns and "response" not in columns:
            return {"format": "text", "columns": {"text": columns.get("prompt", "text")}}
    elif (role := tags.get("role_tag", "from")) == "role":
        wanted = {
            "messages": columns.get("messages", "conversations"),
            "role": role,
            "content": tags.get("content_tag", "value"),
        }
    else:
        wanted = {"conversations": columns.get("messages", "conversations")}
        wanted |= {ours: columns[ours] for ours in ("system", "tools") if columns.get(ours)}
        if role != "from" or tags.get("content_tag", "value") != "value":
            wanted |= {"role": role, "content": tags.get("content_tag", "value")}
    name = "alpaca" if "output" in wanted else "messages" if "messages" in wanted else "sharegpt"
    other = {ours: column for ours, column in wanted.items() if ours != column}
    return {"format": name, **({"columns": other} if other else {})}


TOOL = Tool(
    "LLaMA-Factory",
    frozenset({"finetuning_type", "stage", "template", "dataset_dir", "quantization_bit"}),
    KEYS,
    DEFAULTS,
    finish,
)
