"""LLaMA-Factory: its training YAML, with `dataset_info.json` for the datasets' names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from finetune.files import parse_json, read_json
from finetune.recipe.foreign import common
from finetune.recipe.foreign.preferences import (
    LABEL_SMOOTHING,
    NO_WEIGHTING,
    OTHER_REFERENCE,
    has_pairs_or_labels,
    read_loss,
    read_method,
    read_preferences,
    row_format_of,
)
from finetune.recipe.foreign.rules import ConfigReader, Ignore, Keep, Read, Refuse, Rule, Tool, as_list, each, kept
from finetune.recipe.foreign.shared import (
    LARGEST_FILE,
    TRAINING_ARGUMENTS,
    TRAINING_DEFAULTS,
    first_columns,
    merged_or_refused,
    paths_of,
    read_targets,
    read_template,
    read_training_arguments,
)
from finetune.settings.base_formats import BITS_16, switches

_IMAGES = Ignore("for images, video or sound")
_EXPORT = Refuse("is for exporting: `finetune merge RUN` writes the merged model")


_OTHER_LOSS = Refuse("another loss is added, which method dpo doesn't have")
_KTO_ONLY = Ignore("of stage kto")
_PAIR_KEYS: dict[str, Rule] = {
    "kto_chosen_weight": _KTO_ONLY, "kto_rejected_weight": _KTO_ONLY,
    "pref_beta": Keep("beta", float), "pref_ftx": Keep("sft_weight", lambda weight: float(weight) or None),
    "pref_bco_weight": _OTHER_LOSS,
    "pref_loss": Read(), "dpo_label_smoothing": LABEL_SMOOTHING, "ld_alpha": NO_WEIGHTING, "ref_model": OTHER_REFERENCE,
    "ref_model_adapters": OTHER_REFERENCE, "ref_model_quantization_bit": OTHER_REFERENCE,
}  # fmt: skip
_KTO_KEYS: dict[str, Rule] = {
    **_PAIR_KEYS, "kto_chosen_weight": Keep("desirable_weight", float),
    "kto_rejected_weight": Keep("undesirable_weight", float),
    "pref_ftx": Refuse("adds SFT's loss, which method kto doesn't have", (0, 0.0)), "pref_loss": Ignore("of stage dpo"),
    "dpo_label_smoothing": Ignore("of stage dpo"),
}  # fmt: skip

KEYS: dict[str, Rule] = {
    **TRAINING_ARGUMENTS,
    **kept("model_name_or_path lora_alpha lora_dropout use_rslora use_dora"),
    **each(common.PROCESS, """
        use_fast_tokenizer print_param_status create_new_adapter eval_on_each_dataset ray_run_name ray_storage_path
        ray_init_kwargs
    """),
    **each(common.MEMORY, """
        low_cpu_mem_usage use_unsloth_gc disable_gradient_checkpointing use_reentrant_gc offload_folder streaming buffer_size
    """),
    **each(common.KERNELS, "flash_attn use_unsloth enable_liger_kernel use_v1_kernels upcast_layernorm upcast_lmhead_output"),
    **each(common.NEW_TOKENS, "resize_vocab add_tokens add_special_tokens new_special_tokens_config"),
    **each(common.NOT_TRAINED, """
        mixture_of_depths train_from_scratch fp8 use_galore use_apollo use_badam use_adam_mini use_muon use_dft_loss
        use_asft_loss use_eaft_loss use_llama_pro use_mca use_kt freeze_language_model
    """),
    **each(common.GENERATION, """
        infer_backend infer_dtype use_kv_cache eval_num_beams max_new_tokens max_length temperature top_p top_k do_sample
        num_beams repetition_penalty
    """),
    **each(Read(), """
        quantization_bit stage finetuning_type lora_target dataset dataset_dir eval_dataset max_samples template packing
        neat_packing enable_thinking media_dir
    """),
    **each(common.GPUS, "quantization_device_map ray_num_workers resources_per_worker placement_strategy"),
    **each(common.OTHER_METHOD, """
        fp8_backend loraplus_lr_embedding pissa_iter pissa_convert freeze_trainable_layers freeze_trainable_modules
        oft_block_size oft_rank oft_target module_dropout galore_target galore_rank galore_scale galore_layerwise
        galore_update_interval galore_proj_type apollo_target apollo_rank apollo_scale apollo_layerwise apollo_scale_type
        badam_mode badam_switch_mode badam_switch_interval badam_verbose badam_update_ratio badam_mask_mode badam_start_block
        asft_alpha eaft_alpha muon_lr kt_config kt_cpu_activation kt_optimize_rule simpo_gamma ppo_epochs ppo_buffer_size
        ppo_score_norm ppo_target ppo_whiten_rewards reward_model reward_model_adapters reward_model_quantization_bit
        reward_model_type fp8_enable_fsdp_float8_all_gather freeze_extra_modules
    """),
    **each(_IMAGES, """
        freeze_vision_tower freeze_multi_modal_projector image_resolution video_resolution image_max_pixels image_min_pixels
        video_max_pixels video_min_pixels video_fps video_maxlen audio_sampling_rate
    """),
    **each(common.TRACKERS, "use_swanlab swanlab_project swanlab_run_name swanlab_mode"),
    **each(common.DATASET_CACHE, """
        overwrite_cache preprocessing_batch_size preprocessing_num_workers data_shared_file_system
    """),
    **each(common.SECRET, "hf_hub_token ms_hub_token om_hub_token"),
    "model_revision": Keep("model_revision", lambda name: None if name == "main" else name),
    "adapter_name_or_path": common.OTHER_ADAPTER, "trust_remote_code": common.REMOTE_CODE, "cache_dir": Ignore("set HF_HOME"),
    "split_special_tokens": Refuse("special tokens are kept whole"), "rope_scaling": Refuse("positions are not rescaled"),
    "shift_attn": Refuse("attention is not shifted"), "moe_aux_loss_coef": Refuse("the router's loss is not added"),
    "quantization_method": Refuse("only bitsandbytes quantises while loading", ("bnb", "bitsandbytes")),
    "quantization_type": Refuse("4 bits are NF4", ("nf4",)),
    "double_quantization": Refuse("4 bits are quantised twice", (True,)), "lora_rank": Keep("lora_r"),
    "additional_target": common.WHOLE_MODULES, "loraplus_lr_ratio": Refuse("one learning rate for all adapters"),
    "pissa_init": Refuse("adapters start from zero, not from PiSSA"),
    **dict.fromkeys(_PAIR_KEYS, Read()),
    "disable_shuffling": Refuse("rows are shuffled"), "early_stopping_steps": Keep("early_stopping_patience"),
    "compute_accuracy": Ignore("`finetune eval` scores"),
    "include_effective_tokens_per_second": Ignore("tokens per second are always shown"),
    "val_size": Keep("dataset.test_split_size", lambda size: int(size) if size >= 1 else float(size)),
    "cutoff_len": Keep("max_length"), "train_on_prompt": Keep("train_on_inputs"),
    "mask_history": Refuse("every answer of a conversation is learnt"),
    "tool_format": Refuse("tool calls are written by the model's own template"),
    "default_system": Refuse("no system prompt is added to rows"), "mix_strategy": Refuse("datasets are joined", ("concat",)),
    "interleave_probs": Refuse("datasets are joined"),
    "tokenized_path": Refuse("rows tokenised by LLaMA-Factory are not read", lifted_by="dataset.path"),
    "ignore_pad_token_for_loss": Refuse("padding is never learnt", (True,)),
    **dict.fromkeys(("export_dir", "export_size", "export_device", "export_legacy_format"), _EXPORT),
}  # fmt: skip

DEFAULTS: dict[str, Any] = {
    **TRAINING_DEFAULTS, "learning_rate": 5e-5, "lora_r": 8, "lora_dropout": 0.0, "target_modules": "all-linear",
    "max_length": 2048,
    "excess_length": "truncate", **switches(BITS_16), "packing": False,
}  # fmt: skip

#: Columns of LLaMA-Factory's datasets -> our field; the value is its default column.
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_READ_BY_NAME = {
    "alpaca": ("input", "system", "history", "images", "image"),
    **dict.fromkeys(("messages", "sharegpt"), ("system", "tools", "functions", "images", "image")),
}
_REFUSED_COLUMNS = ("videos", "audios")
#: Templates of LLaMA-Factory that write thoughts, and models whose own template writes an empty one before an answer without.
_REASONING = r"qwen3(?!_vl_nothink)|deepseekr1|glm4_moe|glm4_5v|glmz1|gpt_oss|hunyuan|mimo|seed_oss|intern_s1|ernie"
_HYBRID = r"qwen3(\.\d)?-[\d.]+b(-a\d+b)?$|qwen3\.\d"
_EMPTY_THOUGHT = "the model's own template decides here where an empty thought is written, and it is learnt with the answer;"
_LONG_ROWS_NOTE = "of a row over cutoff_len the end is cut here; there prompt and answer are shortened in proportion"
_CUT_NOTE = "of a pair over cutoff_len the end is cut here; there a long prompt and the answers are shortened in proportion"
_ROLES = {
    "user_tag": ("human", "user"), "assistant_tag": ("gpt", "assistant"), "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",), "system_tag": ("system",),
}  # fmt: skip


def finish(config: ConfigReader) -> None:
    """Keys of LLaMA-Factory that combine."""
    read_training_arguments(config)
    if "infer_backend" in config.values and not {"dataset", "stage", "dataset.path"} & {*config.values, *config.overrides}:
        config.refuse("infer_backend", "this file is for a chat, it does not train: it names no dataset", "dataset.path")
    method = _method(config)
    if "lora_target" in config.values:
        read_targets(config, "lora_target")
    config.assume("lora_alpha", 2 * config.settings.get("lora_r", DEFAULTS["lora_r"]))
    model = str(config.overrides.get("model_name_or_path") or config.value("model_name_or_path", ""))
    if "template" in config.values:
        read_template(config, "template", model)
    _thinking(config, model)
    _packing(config, method)
    _datasets(config, method)


def _method(config: ConfigReader) -> str:
    method = read_method(config, "stage", {"sft": "sft", "dpo": "dpo", "kto": "kto"})
    config.notes.append(_LONG_ROWS_NOTE if method == "sft" else _CUT_NOTE)
    if method == "dpo":
        read_loss(config, "pref_loss")
    read_preferences(config, _KTO_KEYS if row_format_of(method) == "labelled" else _PAIR_KEYS, method)
    config.require_lora("finetuning_type", "lora")
    if (bits := config.value("quantization_bit")) in (4, 8):
        config.keep("quantization_bit", f"load_in_{bits}bit", True)
    elif bits is not None:
        config.refuse("quantization_bit", "4 and 8 bits are supported")
    return method


def _thinking(config: ConfigReader, model: str) -> None:
    """Say where thoughts are written, or learnt, otherwise than by the model's own template."""
    template, off = str(config.value("template", "")), config.value("enable_thinking") is False
    config.ignore("enable_thinking", "thoughts are learnt where rows have them")
    if "chat_template" in config.overrides or not re.match(_REASONING, template):
        return
    if template.endswith("_nothink") and re.search(_HYBRID, model, re.I):
        config.notes.append(f"template {template}: {_EMPTY_THOUGHT} there it writes none")
    elif off:
        config.notes.append(
            f"enable_thinking false: {_EMPTY_THOUGHT} there thoughts are removed, and an empty one is not learnt"
        )
    elif not template.endswith("_nothink"):
        config.notes.append(f"template {template}: {_EMPTY_THOUGHT} there every answer without a thought gets one")


def _packing(config: ConfigReader, method: str) -> None:
    if has_pairs_or_labels(method):
        for key in ("neat_packing", "packing"):
            config.ignore(key, f"method {method} does not pack its rows")
        return
    neat_packing, packing = config.is_on("neat_packing"), config.is_on("packing")
    config.keep("neat_packing", "packing", neat_packing or packing)
    note = "rows of a packed sequence don't see each other here; there they do without neat_packing"
    config.keep("packing", "packing", neat_packing or packing, note if packing and not neat_packing else "")


def _datasets(config: ConfigReader, method: str) -> None:
    if config.is_replaced("dataset.path", ("dataset", "dataset_dir", "eval_dataset", "max_samples", "media_dir")):
        return
    for key in ("dataset_dir", "eval_dataset", "max_samples", "media_dir"):
        config.ignore(key, "of the dataset")
    if not method:
        config.ignore("dataset", "is of that stage")
        return
    names = as_list(config.value("dataset", []))
    info, folder = _dataset_info(config)
    if not names:
        return
    merged = merged_or_refused(config, "dataset", [_dataset_settings(name, info, folder, method) for name in names])
    if not merged:
        return
    _media_folder(config, merged)
    for name, value in reversed(merged.items()):
        config.keep("dataset", f"dataset.{name}", value)
    _eval_dataset(config, info, folder, method)
    _max_samples(config, paths_of(merged))
    config.ignore("dataset_dir", f"dataset_info.json is read from {folder}")


def _media_folder(config: ConfigReader, merged: dict[str, Any]) -> None:
    """The folder where paths of pictures start, where the configuration names one."""
    if "media_dir" in config.values and "images" in merged.get("columns", {}):
        merged.pop("image_folder", None)
        config.keep("media_dir", "dataset.image_folder", config.value("media_dir"))
    else:
        config.ignore("media_dir", "no dataset has pictures")


def _eval_dataset(config: ConfigReader, info: dict[str, Any], folder: Path, method: str) -> None:
    if "eval_dataset" not in config.values:
        return
    datasets = [_dataset_settings(name, info, folder, method) for name in as_list(config.value("eval_dataset"))]
    if all(isinstance(dataset, dict) and Path(dataset["path"]).is_file() for dataset in datasets):
        config.keep("eval_dataset", "dataset.eval_path", [dataset["path"] for dataset in datasets if isinstance(dataset, dict)])
    else:
        config.refuse("eval_dataset", "is not a local file of dataset_info.json", "dataset.eval_path")


def _max_samples(config: ConfigReader, paths: list[str]) -> None:
    max_samples = config.value("max_samples")
    if max_samples is None:
        return
    counts = [count_rows(Path(path)) for path in paths]
    if len(paths) == 1:
        config.keep("max_samples", "dataset.max_rows", max_samples)
    elif all(row_count is not None and row_count <= max_samples for row_count in counts):
        config.ignore("max_samples", "no dataset has more rows")
    elif all(counts) and "dataset.weights" not in config.settings:
        weights = [min(1.0, max_samples / (row_count or 1)) for row_count in counts]
        config.keep(
            "max_samples", "dataset.weights", weights, "of a larger dataset so many rows, chosen by seed; there the first"
        )
    else:
        config.refuse("max_samples", "is for each dataset there, and for all together here", "dataset.max_rows")


def count_rows(path: Path) -> int | None:
    """Number of rows of a small local file; None if unknown."""
    if not path.is_file() or path.stat().st_size > LARGEST_FILE:
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".jsonl":
        return sum(bool(line.strip()) for line in text.split("\n"))
    try:
        rows = parse_json(text)
    except ValueError:
        return None
    return len(rows) if isinstance(rows, list) else None


def _dataset_info(config: ConfigReader) -> tuple[dict[str, Any], Path]:
    """`dataset_info.json` and its folder: `dataset_dir` relative to this folder, the file's, or a parent of the file's."""
    folder = Path(str(config.value("dataset_dir", "data")))
    folders = [folder, *(parent / folder for parent in (config.folder, *config.folder.absolute().parents[:3])), config.folder]
    for candidate in folders:
        try:
            return read_json(candidate / "dataset_info.json", dict), candidate
        except (OSError, ValueError):
            continue
    return {}, folder


def _dataset_settings(name: str, info: dict[str, Any], folder: Path, method: str) -> dict[str, Any] | str:
    """A dataset as settings without the prefix `dataset.`, or the reason why it can't be used."""
    entry = info.get(name)
    if not isinstance(entry, dict):
        if Path(name).is_file():
            return {"path": name}
        return f"{name} is not in {folder / 'dataset_info.json'}" + ("" if info else ", which was not found")
    columns, tags = entry.get("columns", {}), entry.get("tags", {})
    if refused := [column for column in _REFUSED_COLUMNS if columns.get(column)]:
        return f"{name} is for video or sound (columns {', '.join(refused)})"
    if bool(columns.get("kto_tag")) != (row_format_of(method) == "labelled"):
        labels = "answers marked good or bad, for stage kto" if columns.get("kto_tag") else "no labels (column kto_tag)"
        return f"{name} has {labels}"
    if bool(entry.get("ranking")) != (row_format_of(method) == "preference"):
        return f"{name} has pairs of answers, for stage dpo" if entry.get("ranking") else f"{name} has no pairs (ranking: true)"
    if row_format_of(method) == "preference" and not {"chosen", "rejected"} <= set(columns):
        return f"{name} doesn't name its columns chosen and rejected"
    if columns.get("history"):
        return f"{name} has a history, whose answers LLaMA-Factory learns and finetune reads as context"
    for tag, roles in _ROLES.items():
        if tags.get(tag, roles[0]) not in roles:
            return f"{name} calls a role {tags[tag]}; finetune knows {' and '.join(roles)}"
    settings: dict[str, Any] = {"path": str(entry.get("hf_hub_url") or folder / str(entry.get("file_name")))}
    if (sample_count := entry.get("num_samples")) is not None:
        row_count = count_rows(Path(settings["path"]))
        if not row_count:
            return f"{name} has num_samples {sample_count}, and its rows can't be counted here; use dataset.weights"
        settings["weights"] = [sample_count / row_count]
    hub = {"name": entry.get("subset"), "split": entry.get("split")} if entry.get("hf_hub_url") else {}
    settings |= {key: value for key, value in hub.items() if value} | _format(entry, columns, tags)
    if columns.get("images"):
        settings["columns"] = {**settings.get("columns", {}), "images": columns["images"]}
        if Path(settings["path"]).parent != folder:
            settings["image_folder"] = str(folder)
    unread = _unread_columns(settings, columns)
    return settings | ({"ignore_columns": unread} if unread else {})


def _unread_columns(settings: dict[str, Any], columns: dict[str, str]) -> list[str]:
    """Columns of a local file that finetune reads by their names, and LLaMA-Factory only where `columns` has them."""
    names = {name for name in _READ_BY_NAME.get(settings["format"], ()) if columns or name != "input"}
    return sorted((names & first_columns(Path(settings["path"]))) - set(columns.values()))


def _format(entry: dict[str, Any], columns: dict[str, str], tags: dict[str, str]) -> dict[str, Any]:
    """The format, and the columns that don't have the format's own names."""
    answers = {field: columns[field] for field in ("chosen", "rejected") if field in columns}
    if entry.get("formatting", "alpaca") == "alpaca":
        columns_by_field = {field: columns.get(key, field) for key, field in _ALPACA.items() if key in columns or not columns}
        columns_by_field |= {"system": columns["system"]} if columns.get("system") else {}
        if columns and "response" not in columns and not answers:
            return {"format": "text", "columns": {"text": columns.get("prompt", "text")}}
    else:
        role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
        columns_by_field = {"messages" if role == "role" else "conversations": columns.get("messages", "conversations")}
        columns_by_field |= {field: columns[field] for field in ("system", "tools") if columns.get(field)}
        if (role, content) != ("from", "value"):
            columns_by_field |= {"role": role, "content": content}
    name = "alpaca" if "output" in columns_by_field else "messages" if "messages" in columns_by_field else "sharegpt"
    name, columns_by_field = ("preference", columns_by_field | answers) if answers else (name, columns_by_field)
    if columns.get("kto_tag"):
        name, columns_by_field = "labelled", columns_by_field | {"label": columns["kto_tag"]}
    renamed = {field: column for field, column in columns_by_field.items() if field != column}
    return {"format": name, **({"columns": renamed} if renamed else {})}


TOOL = Tool(
    "LLaMA-Factory", "finetuning_type stage template dataset_dir quantization_bit", KEYS, DEFAULTS, finish, interpolates=True
)
