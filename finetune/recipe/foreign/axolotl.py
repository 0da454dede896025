"""Axolotl: its YAML, with its list of datasets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from finetune.recipe.foreign import common
from finetune.recipe.foreign.axolotl_pairs import PAIR_KEYS, columns_of_labels, columns_of_pairs, read_rl
from finetune.recipe.foreign.preferences import OTHER_METHODS, row_format_of
from finetune.recipe.foreign.rules import ConfigReader, Ignore, Keep, Read, Refuse, Rule, Tool, as_list, each, is_off, kept
from finetune.recipe.foreign.shared import (
    DIFFERENT_DATASETS,
    TRAINING_ARGUMENTS,
    TRAINING_DEFAULTS,
    assume_peft_targets,
    for_model,
    merge_datasets,
    own_template_note,
    read_batch,
    read_optimizer,
    read_schedule,
    read_template,
)
from finetune.settings.base_formats import BITS_16, switches

_MODEL = Ignore("is read from the model")
_OWN_LOADER = Refuse("the model is loaded by finetune")

_SWANLAB = [f"swanlab_{name}" for name in (
    "project", "experiment_name", "description", "mode", "workspace", "log_model", "log_completions",
    "completion_log_interval", "completion_max_buffer", "web_host", "api_host", "run_id", "tags",
)]  # fmt: skip

KEYS: dict[str, Rule] = {
    **{key: rule for key, rule in TRAINING_ARGUMENTS.items() if not key.startswith("per_device")},
    **each(_MODEL, """
        base_model_config model_type tokenizer_type processor_type is_falcon_derived_model is_llama_derived_model
        is_mistral_derived_model is_qwen_derived_model
    """),
    **each(common.PROCESS, """
        tokenizer_use_fast tokenizer_legacy strict device tokenizer_save_jinja_files debug hf_use_auth_token
        dataloader_drop_last sample_packing_group_size sample_packing_bin_size multipack_real_batches sample_packing_eff_est
        total_num_tokens total_supervised_tokens
    """),
    **each(Refuse("the model's own configuration is used"), "model_config overrides_of_model_config"),
    **each(common.NOT_TRAINED, """
        gptq peft peft_layer_replication peft_trainable_token_indices relora relora_steps unfrozen_parameters fp8 qat
        quantization pretraining_dataset use_pose
    """),
    **each(Read(), """
        special_tokens bnb_config_kwargs adapter lora_target_modules lora_target_linear micro_batch_size batch_size optimizer
        bfloat16 float16 plugins rl datasets test_datasets chat_template chat_template_jinja eot_tokens
    """),
    **kept("load_in_8bit load_in_4bit lora_r lora_alpha early_stopping_patience train_on_inputs"),
    **each(common.MEMORY, """
        low_cpu_mem_usage max_memory gpu_memory_limit lora_on_cpu embeddings_skip_upcast gc_steps activation_offloading
        tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp layer_offloading experimental_skip_move_to_device
        selective_checkpointing streaming eval_sample_packing pad_to_sequence_len batch_flattening
    """),
    **each(common.GPUS, """
        device_map qlora_sharded_model_loading ddp world_size ddp_bucket_cap_mb ddp_broadcast_buffers accelerator_config
        fsdp_version fsdp_final_state_dict_type tensor_parallel_size context_parallel_size sequence_parallel_degree use_ray
        dp_shard_size dp_replicate_size expert_parallel_size context_parallel_strategy ray_num_workers resources_per_worker
    """),
    **each(Refuse("one learning rate for all adapters"), "loraplus_lr_ratio lr_groups"),
    **each(common.KERNELS, """
        peft_autocast_adapter_dtype lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel flash_attention
        attn_implementation sdp_attention xformers_attention eager_attention flex_attention sage_attention
        flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp unsloth_cross_entropy_loss
        unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope liger_rope liger_rms_norm
        liger_glu_activation liger_swiglu liger_layer_norm liger_fused_linear_cross_entropy liger_cross_entropy
        cut_cross_entropy liger_rms_norm_gated use_kernels use_scattermoe use_sonicmoe experts_implementation
        fused_attn_kernel gemma4_hybrid_attn_impl flex_attn_compile_kwargs flash_optimum use_glm_dsa_kernels use_dsv4_kernels
    """),
    **each(common.STEPS, """
        evals_per_epoch saves_per_epoch eval_table_size eval_max_new_tokens eval_table_max_new_tokens save_first_step
        do_causal_lm_eval eval_causal_lm_metrics do_bench_eval
    """),
    **each(common.TRACKERS, """
        wandb_project wandb_entity wandb_watch wandb_name wandb_run_id wandb_mode wandb_log_model use_wandb
        mlflow_tracking_uri mlflow_experiment_name use_mlflow use_comet comet_project_name use_swanlab use_otel_metrics
        otel_metrics_host otel_metrics_port use_tensorboard use_trackio
    """),
    **each(common.DATASET_CACHE, """
        dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory skip_prepare_dataset
    """),
    **each(Refuse("every layer gets an adapter"), "peft_layers_to_transform lora_layers_to_transform peft_layers_pattern"),
    **each(common.UPLOAD, "merge_lora merge_method push_dataset_to_hub"),
    **each(Refuse("embeddings are not trained"), "embedding_lr embedding_lr_scale"),
    **each(Ignore("a run that diverges is stopped"), "loss_watchdog_threshold loss_watchdog_patience"),
    **each(Refuse(OTHER_METHODS["rm"]), "reward_model process_reward_model"),
    **each(common.EVERY_STEP, "profiler_steps profiler_steps_start include_tkps"),
    **each(Refuse("all rows are read"), "dataset_shard_num dataset_shard_idx"),
    "base_model": Keep("model_name_or_path"), "revision_of_model": Keep("model_revision"),
    "tokenizer_config": Refuse("the model's own tokenizer is used"), "trust_remote_code": common.REMOTE_CODE,
    "freeze_mm_modules": Ignore("only the language model trains"), "overrides_of_model_kwargs": _OWN_LOADER,
    "tokens": common.NEW_TOKENS, "added_tokens_overrides": Refuse("the names of a model's tokens are not changed"),
    "resize_token_embeddings_to_32x": Refuse("the vocabulary keeps its size"),
    "fix_untrained_tokens": Refuse("embeddings are not changed"),
    "model_quantization_config": Refuse("the model is loaded as it is stored, or in 16 bit", ("Mxfp4Config",)),
    "model_quantization_config_kwargs": Refuse("the model is loaded as it is stored, or in 16 bit", ({"dequantize": True},)),
    "llama4_linearized_experts": Refuse("experts are not taken apart into linear layers"),
    "quantize_moe_experts": Ignore("experts are quantised with the other layers"),
    "lora_dropout": Keep("lora_dropout", float), "lora_target_parameters": Refuse("adapters are on linear layers"),
    "lora_model_dir": common.OTHER_ADAPTER, "lora_modules_to_save": common.WHOLE_MODULES,
    "lora_fan_in_fan_out": Ignore("layers are linear: PEFT turns it off"), "peft_use_dora": Keep("use_dora"),
    "peft_use_rslora": Keep("use_rslora"), "peft_init_lora_weights": Refuse("adapters start from PEFT's default", (True,)),
    "loraplus_lr_embedding": Ignore("of LoRA+, which is not used"), "eval_batch_size": Keep("per_device_eval_batch_size"),
    "num_epochs": Keep("num_train_epochs", float), "lr_scheduler": Keep("lr_scheduler_type"),
    "learning_rate": Keep("learning_rate", float), "cosine_min_lr_ratio": Refuse("the cosine ends at zero"),
    "cosine_constant_lr_ratio": Refuse("changes the schedule"), "lr_quadratic_warmup": Refuse("the warmup is linear"),
    "float32": Refuse("set dtype=float32", lifted_by="dtype"), "s2_attention": Refuse("attention is not shifted"),
    "tokenizer_use_mistral_common": Ignore("the model's own tokenizer and chat template are used"),
    **dict.fromkeys(PAIR_KEYS, Read()), **dict.fromkeys(_SWANLAB, common.TRACKERS),
    "generate_samples": Ignore("see sample_answers"), "hub_token": common.SECRET,
    "auto_resume_from_checkpoints": Ignore("`finetune resume RUN` continues"),
    "shuffle_merged_datasets": Refuse("rows are shuffled", (True,)),
    "dataset_exact_deduplication": Refuse("equal rows are kept; remove them from the file"),
    "val_set_size": Keep("dataset.test_split_size", lambda size: int(size) if size >= 1 else float(size)),
    "sequence_len": Keep("max_length"), "min_sample_len": Refuse("short rows are kept"),
    "excess_length_strategy": Keep("excess_length"), "sample_packing": Keep("packing"),
    "sample_packing_sequentially": Refuse("rows are packed by length"), "curriculum_sampling": Refuse("rows are shuffled"),
    "default_system_message": Refuse("no system prompt is added to rows"),
}  # fmt: skip

#: `sequence_len` and the batch are Axolotl's schema, the warmup its trainer, the rest TrainingArguments'.
DEFAULTS: dict[str, Any] = {
    **TRAINING_DEFAULTS, "num_train_epochs": 1.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.03, "max_length": 512,
    "excess_length": "drop",
    "lora_dropout": 0.0, **switches(BITS_16), "packing": False,
}  # fmt: skip

_DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt", ".gz", ".zst")
_ALPACA_NOTE = (
    "Axolotl writes alpaca rows as text with `### Instruction:`; here the model's chat template is used where it has one"
)
#: Types of datasets -> format, columns, note.
_TYPES: dict[str, tuple[str, dict[str, str], str]] = {
    "alpaca": ("alpaca", {}, _ALPACA_NOTE), "chat_template": ("messages", {}, ""), "completion": ("text", {}, ""),
    "alpaca_chat": ("alpaca", {}, ""), "chat_template.default": ("messages", {}, ""),
    "alpaca_chat.load_qa": ("alpaca", {"instruction": "question", "output": "answer"}, ""),
}  # fmt: skip
#: Plugins of kernels, trackers and several GPUs.
_HARMLESS_PLUGINS = ("Liger", "CutCrossEntropy", "KernelsPlugin", "SwanLab", "ExpertParallel")
_CHATML = ("<|im_end|>", "<|startoftext|>", "<|endoftext|>", "<|end_of_text|>")
#: Models -> the special tokens of their own tokenizer and the tokens that end a turn in their template, by their publishers'
#: tokenizer_config.json and generation_config.json, 2026-08.
_OWN_TOKENS: dict[str, tuple[str, ...]] = {
    r"gemma-?4": ("<bos>", "<eos>", "<turn|>"), r"gemma": ("<bos>", "<eos>", "<end_of_turn>"),
    r"llama-?4": ("<|begin_of_text|>", "<|eot|>", "<|end_of_text|>"),
    r"llama-?3": ("<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"),
    r"gpt-oss": ("<|return|>", "<|end|>", "<|startoftext|>"), r"phi-?3": ("<|end|>", "<|endoftext|>", "<s>"),
    r"phi-?4": ("<|im_end|>", "<|end|>", "<|endoftext|>"),
    r"phi-?[12]|pythia|gpt-neox|stablelm|falcon-\d|xgen": ("<|endoftext|>",),
    r"qwen|smollm|granite-?4|falcon-h1|hermes|olmo|lfm": _CHATML, r"yi-": _CHATML,
    r"mi[nx]?i?stral|mixtral|devstral|magistral|voxtral|code-?llama|llama-?2|tinyllama|open_llama": ("<s>", "</s>"),
}  # fmt: skip
_SHAREGPT_NOTE = "type sharegpt is of an earlier Axolotl; its rows are written with the model's own template here"
_ROLES = {
    "user": {"human", "user"},
    "assistant": {"gpt", "assistant", "model"},
    "system": {"system"},
    "tool": {"tool", "observation"},
}
#: Keys of a dataset -> the value that changes nothing; None if no value does.
_NEUTRAL_VALUES = {
    "ds_type": None, "preprocess_shards": None, "trust_remote_code": None, "split_thinking": False,
    "roles_to_train": ["assistant"], "train_on_eos": "turn",
    "train_on_eot": "turn", "drop_system_message": False, "field_tools": "tools", "field_system": "system",
}  # fmt: skip


def finish(config: ConfigReader) -> None:
    """Keys of Axolotl that combine."""
    _batch(config)
    read_schedule(config)
    read_optimizer(config, "optimizer" if "optimizer" in config.values else "optim")
    model = str(config.overrides.get("model_name_or_path") or config.value("base_model", ""))
    _adapter(config, model)
    _tokens(config, model)
    _quantisation(config)
    if not {"warmup_steps", "warmup_ratio"} & {*config.values, *config.overrides}:
        config.assume("warmup_ratio", 0.03, "warmup of 3 % of the steps is Axolotl's default; there it is at most 100 steps")
    if config.is_on("chat_template_jinja"):
        config.refuse("chat_template_jinja", "save the template as a file", "chat_template")
    if "chat_template" in config.values:
        if config.value("chat_template") == "jinja":
            config.share("chat_template", "chat_template_jinja")
        else:
            read_template(config, "chat_template", model)
    if "plugins" in config.values:
        plugins = as_list(config.value("plugins"))
        other_plugins = [name for name in plugins if not any(harmless in name for harmless in _HARMLESS_PLUGINS)]
        if other_plugins:
            config.refuse("plugins", f"{', '.join(other_plugins)} may change what is learnt")
        else:
            config.ignore("plugins", common.KERNELS.reason)
    method = read_rl(config)
    if not config.is_replaced("dataset.path", ("datasets", "test_datasets")):
        _datasets(config, model, method)


def _batch(config: ConfigReader) -> None:
    batch_size, micro_batch = config.value("batch_size"), config.value("micro_batch_size")
    if batch_size is not None:  # the effective batch, from which Axolotl derives the missing factor
        if micro_batch is None or "gradient_accumulation_steps" not in config.values:
            config.keep("batch_size", "effective_batch_size", batch_size)
            for key in ("micro_batch_size", "gradient_accumulation_steps"):
                config.share(key, f"effective_batch_size {batch_size}")
            return
        config.ignore("batch_size", "micro_batch_size and gradient_accumulation_steps are both set")
    read_batch(config, "micro_batch_size", "gradient_accumulation_steps")


def _adapter(config: ConfigReader, model: str) -> None:
    if "adapter" in config.values:
        config.require_lora("adapter", "lora", "qlora")
    else:
        config.refuse("adapter", "is not set, which trains all parameters; finetune trains LoRA adapters")
    all_linear = config.is_on("lora_target_linear")
    if all_linear:
        config.keep("lora_target_linear", "target_modules", "all-linear")
    else:
        config.ignore("lora_target_linear", "is off")
    if "lora_target_modules" in config.values:
        if all_linear:
            config.share("lora_target_modules", "target_modules all-linear")
        else:
            config.keep("lora_target_modules", "target_modules", _modules(config.value("lora_target_modules")))
    elif not all_linear:
        assume_peft_targets(config, model)


def _modules(value: Any) -> Any:
    """Names of modules as a list; a regular expression stays one text, and also matches a language model loaded alone."""
    if isinstance(value, str) and set(value) & set("*|()\\["):
        return re.sub(r"language_model\\?\.", r"(language_model\\.)?", value)
    return as_list(value)


def _tokens(config: ConfigReader, model: str) -> None:
    """Special tokens and ends of turns, accepted where they are what the model's tokenizer and template have anyway."""
    own_tokens = for_model(_OWN_TOKENS, model, ())
    usual = {"bos_token": ("<s>", "<|begin_of_text|>"), "eos_token": ("</s>", "<|end_of_text|>", "<|endoftext|>")}
    tokens = config.value("special_tokens")
    for key, value in tokens.items() if isinstance(tokens, dict) else ():
        if key in usual and value is not None and value not in (*usual[key], *own_tokens):
            config.refuse("special_tokens", f"{key} {value}: the model's own special tokens are used")
    config.ignore("special_tokens", "the model's own are used; padding is never learnt")
    if other_ends := [token for token in as_list(config.value("eot_tokens", [])) if token not in own_tokens]:
        config.refuse("eot_tokens", f"{', '.join(other_ends)}: answers end with what the template writes", "chat_template")
    config.ignore("eot_tokens", "answers end with what the model's template writes, which this is")


def _quantisation(config: ConfigReader) -> None:
    """bitsandbytes' own arguments, accepted where they are what 4 bits are here."""
    arguments = config.value("bnb_config_kwargs")
    neutral = {"bnb_4bit_use_double_quant": (True,), "bnb_4bit_quant_type": ("nf4",), "llm_int8_has_fp16_weight": (False,)}
    free = ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")
    for key, value in arguments.items() if isinstance(arguments, dict) else ():
        if key not in free and value not in neutral.get(key, ()):
            config.refuse("bnb_config_kwargs", f"{key} {value}: 4 bits are NF4 with double quantisation")
    config.ignore("bnb_config_kwargs", "is what finetune does")


def _datasets(config: ConfigReader, model: str, method: str) -> None:
    if not method:
        for key in ("datasets", "test_datasets"):
            config.ignore(key, "is of that method")
        return
    dataset, reason, note = _merged_dataset(config.value("datasets", []), model, method)
    if reason:
        config.refuse("datasets", reason, "dataset.path")
    elif dataset:
        for name, value in dataset.items():
            config.keep("datasets", f"dataset.{name}", value)
        config.keep("datasets", "dataset.path", dataset["path"], note)
    if "test_datasets" in config.values:
        held_out, reason, _ = _merged_dataset(config.value("test_datasets"), model, method)
        if not reason and held_out.get("path") == dataset.get("path") and held_out.get("split"):
            config.keep("test_datasets", "dataset.eval_split", held_out["split"])
        elif not reason and _without_path(held_out) == _without_path(dataset):
            config.keep("test_datasets", "dataset.eval_path", held_out["path"])
        else:
            config.refuse(
                "test_datasets", reason or "would be read with the split and columns of the training rows", "dataset.eval_path"
            )


def _without_path(dataset: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in dataset.items() if name != "path"}


def _merged_dataset(entries: Any, model: str, method: str) -> tuple[dict[str, Any], str, str]:
    """Datasets as settings without the prefix `dataset.`, the reason why they can't be used, and a note."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return {}, "is not a list of datasets" if entries else "", ""
    datasets = []
    for entry in entries:
        own = {key: value for key, value in entry.items() if value is not None}
        settings, reason, note = _dataset_settings(own, model, method)
        if reason:
            return {}, reason, ""
        datasets.append((settings, note))
    if not datasets:
        return {}, "", ""
    merged = merge_datasets([settings for settings, _ in datasets])
    notes = ". ".join(dict.fromkeys(note for _, note in datasets if note))
    return (merged, "", notes) if merged else ({}, DIFFERENT_DATASETS, "")


def _columns(entry: dict[str, Any], model: str, method: str) -> tuple[str, dict[str, str], str, str]:
    """Format and columns of a dataset, a note, and the reason why it can't be read; removes its keys from `entry`."""
    kind = entry.pop("type", None)
    name = str(kind).partition(":")[0]
    if kind == "sharegpt" and row_format_of(method) != "preference":  # of earlier releases: `conversation` names the template
        entry["chat_template"] = entry.pop("conversation", "tokenizer_default")
        return "sharegpt", {}, _SHAREGPT_NOTE, ""
    if row_format_of(method) == "preference":
        row_format, (columns, note, reason) = "preference", columns_of_pairs(kind, entry, model)
    elif row_format_of(method) == "labelled":
        row_format, (columns, note, reason) = "labelled", columns_of_labels(kind, entry, model)
    elif isinstance(kind, str) and name in _TYPES:
        (row_format, columns, note), reason = _TYPES[name], ""
    else:
        reason = f"type {kind if isinstance(kind, str) else 'with its own prompt'} is unknown, and decides what rows look like"
        return "", {}, "", reason
    if name.startswith("chat_template") and not reason:
        conversation_format, conversation_columns, reason = _conversation(entry)
        row_format = row_format if row_format == "preference" else conversation_format
        columns = {**columns, **conversation_columns}
    if name == "completion" and entry.get("field", "text") != "text":
        columns = {"text": entry["field"]}
    entry.pop("field", None)
    return row_format, columns, note, reason


def _dataset_settings(entry: dict[str, Any], model: str, method: str) -> tuple[dict[str, Any], str, str]:
    row_format, columns, note, reason = _columns(entry, model, method)
    if reason:
        return {}, reason, ""
    template = str(entry.pop("chat_template", "tokenizer_default"))
    if (template_note := own_template_note(template, model)) is None:
        return {}, f"chat_template {template} of a dataset is not the template of {model}, judging by its name", ""
    split = str(entry.pop("split", "train"))
    settings: dict[str, Any] = {"path": entry.pop("path", None)}
    if settings["path"] in ("json", "csv", "parquet", None) or "data_files" in entry:
        settings["path"] = entry.pop("data_files", None) or settings["path"]
    if not settings["path"]:
        return {}, "a dataset has no path", ""
    split_settings, reason, split_note = _part(split, str(settings["path"]))
    if reason:
        return {}, reason, ""
    settings |= split_settings
    note = ". ".join(text for text in (note, split_note, template_note) if text)
    settings |= {setting: entry.pop(setting) for setting in ("name", "revision") if setting in entry}
    for key, value in entry.items():
        if not _is_neutral(key, value):
            return {}, f"{key} {value} of a dataset is not known, or changes what is learnt", ""
    return {**settings, "format": row_format, **({"columns": columns} if columns else {})}, "", note


def _is_neutral(key: str, value: Any) -> bool:
    """Whether a key of a dataset changes nothing. `train_on_eos: none` is off, and not the default."""
    if key not in _NEUTRAL_VALUES:
        return False
    neutral = _NEUTRAL_VALUES[key]
    return neutral is None or value == neutral or (neutral is False and is_off(value))


def _part(split: str, path: str) -> tuple[dict[str, Any], str, str]:
    """A split such as `train[:20%]` as settings, the reason why it can't be read, and a note.

    The hub's loader slices splits itself; of a local file only the first rows, or a share of all, can be taken.
    """
    name, bracket, rows = split.partition("[")
    settings = {"split": name} if name != "train" else {}
    if not bracket:
        return settings, "", ""
    if not (path.startswith(("/", ".", "~")) or Path(path).exists() or Path(path).suffix in _DATA_SUFFIXES):
        return {"split": split}, "", ""
    match = re.fullmatch(r":(\d+)(%?)\]", rows)
    if not match:
        return {}, f"split {split} takes a part from the middle; set dataset.max_rows", ""
    if not match[2]:
        return {**settings, "max_rows": int(match[1])}, "", ""
    return {**settings, "weights": [int(match[1]) / 100]}, "", f"{match[1]} % of the rows, chosen by seed; there the first ones"


def _conversation(entry: dict[str, Any]) -> tuple[str, dict[str, str], str]:
    """Format and columns of a conversation; removes its keys from `entry`."""
    mapping = dict(entry.pop("message_property_mappings", {}))
    messages_column = entry.pop("field_messages", "messages")
    role = entry.pop("message_field_role", mapping.pop("role", "role"))
    content = entry.pop("message_field_content", mapping.pop("content", "content"))
    roles = entry.pop("roles", {})
    if any(not set(as_list(names)) <= _ROLES.get(role_name, set()) for role_name, names in roles.items()):
        return "", {}, f"roles {roles} have names that finetune doesn't know"
    if any(setting != column for setting, column in mapping.items()):
        return "", {}, f"message_property_mappings {mapping} is not known"
    columns = {setting: column for setting, column in (("role", role), ("content", content)) if setting != column}
    if (role, content) == ("from", "value"):
        return "sharegpt", {"conversations": messages_column} if messages_column != "conversations" else {}, ""
    return "messages", ({"messages": messages_column} if messages_column != "messages" else {}) | columns, ""


TOOL = Tool(
    "Axolotl",
    "datasets adapter val_set_size pretraining_dataset lora_target_linear dataset_prepared_path",
    KEYS, DEFAULTS, finish,
)  # fmt: skip
