"""torchtune: the YAML of its LoRA recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.recipe.foreign import common
from finetune.recipe.foreign.rules import ConfigReader, Ignore, Keep, Read, Refuse, Rule, Tool, as_list, each, kept
from finetune.recipe.foreign.shared import read_batch, read_dtype
from finetune.settings.base_formats import BITS_16, switches

_READ_FROM_MODEL = Ignore("is read from the model")

_IMAGES = Refuse("is of a model of images and text; rows are text here")

KEYS: dict[str, Rule] = {
    **kept("output_dir dataset.split seed dtype"),
    **each(Read(), """
        model._component_ model.lora_attn_modules model.apply_lora_to_mlp checkpointer.checkpoint_dir dataset._component_
        dataset.source dataset.data_files dataset.conversation_column dataset.conversation_style dataset.column_map.*
        dataset.column batch_size gradient_accumulation_steps optimizer._component_ lr_scheduler._component_
        max_steps_per_epoch
    """),
    **each(_READ_FROM_MODEL, "tokenizer._component_ tokenizer.path tokenizer.merges_file tokenizer.* checkpointer.*"),
    **each(common.PROCESS, "save_adapter_weights_only should_load_recipe_state collate_fn device dataloader.*"),
    **each(common.MEMORY, """
        batch_size_val optimizer_in_bwd enable_activation_checkpointing enable_activation_offloading low_cpu_ram
        fsdp_cpu_offload custom_sharded_layers data_parallel_shard_dim data_parallel_replicate_dim tensor_parallel_dim
    """),
    **each(common.EVERY_STEP, "metric_logger.* log_every_n_steps log_peak_memory_stats log_level profiler.*"),
    **each(common.NOT_TRAINED, "teacher_model.* kd_ratio kd_loss.* quantizer.* teacher_checkpointer.*"),
    **each(_IMAGES, "model.image_size model.encoder_trainable model.decoder_trainable model.fusion_trainable"),
    **each(common.KERNELS, "optimizer.fused loss.* compile"),
    "model.apply_lora_to_output": Refuse("the output layer gets no adapter"), "model.lora_rank": Keep("lora_r"),
    "model.lora_alpha": Keep("lora_alpha"), "model.lora_dropout": Keep("lora_dropout", float),
    "model.use_dora": Keep("use_dora"), "model.quantize_base": Keep("load_in_4bit"),
    "tokenizer.max_seq_len": Keep("max_length"),  # without it rows are not cut, see finish
    "tokenizer.prompt_template": Refuse("the model's own chat template is used", lifted_by="chat_template"),
    "checkpointer.adapter_checkpoint": Refuse("in a recipe it is adapter: FOLDER"),
    "resume_from_checkpoint": Refuse("a new run starts from the beginning; `finetune resume RUN` continues"),
    "dataset.packed": Keep("packing"), "dataset.train_on_input": Keep("train_on_inputs"),
    "dataset.*": Refuse("changes what rows look like", lifted_by="dataset.path"),
    "dataset_val.*": Ignore("set dataset.eval_path"),
    "run_val_every_n_steps": Ignore("the plan chooses how often; set eval_steps"),
    "shuffle": Refuse("rows are shuffled", (True,)), "optimizer.lr": Keep("learning_rate", float),
    "optimizer.weight_decay": Keep("weight_decay", float),
    "optimizer.*": Refuse("finetune's AdamW has PyTorch's betas and epsilon"),
    "lr_scheduler.num_warmup_steps": Keep("warmup_steps"), "lr_scheduler.*": Refuse("changes the schedule"),
    "loss._component_": Refuse("the loss is the cross entropy", tuple(f"torchtune.modules.loss.{name}" for name in (
        "CEWithChunkedOutputLoss", "LinearCrossEntropyLoss")) + ("torch.nn.CrossEntropyLoss",)),
    "epochs": Keep("num_train_epochs", float), "clip_grad_norm": Keep("max_grad_norm", float),
    "save_every_n_steps": Keep("save_steps"), "fsdp.*": common.GPUS, "tensor_parallel_plan.*": common.GPUS,
    "save_every_n_epochs": common.STEPS, "datasets": Refuse("a list of datasets is not read", lifted_by="dataset.path"),
}  # fmt: skip

DEFAULTS: dict[str, Any] = {
    "num_train_epochs": 1.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.0, "weight_decay": 0.01,
    "optim": "adamw_torch_fused", "max_grad_norm": 1e9,
    "excess_length": "truncate", "lora_r": 8, "lora_alpha": 16.0, "lora_dropout": 0.0, **switches(BITS_16),
    "packing": False,
}  # fmt: skip

_MODULES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]
_OPTIMIZERS = {
    "torch.optim.AdamW": "adamw_torch_fused", "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW": "paged_adamw_32bit",
}  # fmt: skip
_ALPACA_NOTE = (
    "torchtune writes alpaca rows as text, 'Below is an instruction ...' with `### Instruction:`, before the model's template; "
    "here the template alone is used"
)
#: Datasets with a source of their own: path, format, whether prompts are learnt.
_DATASETS = {
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca", True), "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca", True),
    "chat_dataset": ("", "messages", False), "instruct_dataset": ("", "alpaca", False),
    "text_completion_dataset": ("", "text", True),
}  # fmt: skip


def finish(config: ConfigReader) -> None:
    """Keys of torchtune that combine."""
    read_batch(config, "batch_size", "gradient_accumulation_steps")
    _model(config)
    component = str(config.value("optimizer._component_", "torch.optim.AdamW"))
    if "optimizer._component_" in config.values:
        if component in _OPTIMIZERS:
            config.keep("optimizer._component_", "optim", _OPTIMIZERS[component])
        else:
            config.refuse("optimizer._component_", f"one of {', '.join(_OPTIMIZERS)} is supported", "optim")
    if "lr_scheduler._component_" in config.values:
        if str(config.value("lr_scheduler._component_")).endswith("get_cosine_schedule_with_warmup"):
            config.keep("lr_scheduler._component_", "lr_scheduler_type", "cosine")
        else:
            config.refuse("lr_scheduler._component_", "changes the schedule", "lr_scheduler_type")
    elif "lr_scheduler_type" not in config.settings:
        config.assume("lr_scheduler_type", "constant")
    if (max_steps := config.value("max_steps_per_epoch")) is not None:
        if float(config.value("epochs", 1)) == 1:
            config.keep("max_steps_per_epoch", "max_steps", max_steps)
        else:
            config.refuse("max_steps_per_epoch", "each epoch is cut there", "max_steps")
    read_dtype(config)
    if "tokenizer.max_seq_len" not in config.values and not {"max_length", "excess_length"} & set(config.overrides):
        config.assume("excess_length", "raise", "tokenizer.max_seq_len is not set: no row is cut; one too long stops the run")
    _dataset(config)


def _model(config: ConfigReader) -> None:
    component = str(config.value("model._component_", ""))
    name = component.rpartition(".")[2]
    if name.startswith("qlora_"):
        config.keep("model._component_", "load_in_4bit", True)
    elif name.startswith("lora_"):
        config.ignore("model._component_", "the model is checkpointer.checkpoint_dir")
    else:
        config.refuse("model._component_", "finetune trains LoRA adapters: lora_... or qlora_...")
    if "checkpointer.checkpoint_dir" in config.values:
        folder = str(config.value("checkpointer.checkpoint_dir"))
        is_local = (Path(folder).expanduser() / "config.json").is_file()
        note = "" if is_local else f"{folder} doesn't exist here: the model of that name is used"
        config.keep("checkpointer.checkpoint_dir", "model_name_or_path", folder if is_local else Path(folder).name, note)
    targets = [_MODULES[module] for module in as_list(config.value("model.lora_attn_modules", [])) if module in _MODULES]
    targets += _MLP if config.is_on("model.apply_lora_to_mlp") else []
    for key in ("model.lora_attn_modules", "model.apply_lora_to_mlp"):
        config.keep(key, "target_modules", targets)


def _dataset(config: ConfigReader) -> None:
    dataset_keys = ("_component_", "source", "data_files", "conversation_column", "conversation_style", "column")
    mapped = [key for key in config.values if key.startswith("dataset.column_map.")]
    keys = [key for key in config.values if key.removeprefix("dataset.") in dataset_keys or key in mapped]
    if config.is_replaced("dataset.path", keys):
        return
    name = str(config.value("dataset._component_", "")).rpartition(".")[2]
    if name not in _DATASETS:
        config.refuse("dataset._component_", "finetune doesn't know what its rows look like", "dataset.path")
        for key in set(keys) - {"dataset._component_"}:
            config.share(key, "dataset._component_")
        return
    path, row_format, trains_on_prompts = _DATASETS[name]
    if config.value("dataset.conversation_style") == "sharegpt":
        row_format = "sharegpt"
    source = config.value("dataset.source", path)
    config.settings["dataset.path"] = (
        config.value("dataset.data_files", source) if source in ("json", "csv", "parquet") else source
    )
    config.settings["dataset.format"] = row_format
    config.assume("train_on_inputs", trains_on_prompts)
    columns = {key.rpartition(".")[2]: config.values[key] for key in mapped}
    if name == "instruct_dataset":  # rows of input and output, without alpaca's instruction
        columns = {"instruction": columns.get("input", "input"), "output": columns.get("output", "output")}
        columns = {field: column for field, column in columns.items() if field != column}
    columns |= {"text": config.value("dataset.column")} if "dataset.column" in config.values else {}
    field = "conversations" if row_format == "sharegpt" else "messages"
    conversations = config.value("dataset.conversation_column", field)
    columns |= {field: conversations} if conversations != field else {}
    if columns:
        config.settings["dataset.columns"] = columns
    for key in keys:
        note = _ALPACA_NOTE if name.startswith("alpaca") and key == "dataset._component_" else ""
        config.share(key, f"dataset.path {config.settings['dataset.path']}", note)
        config.keys_by_setting["dataset.path"] = key


TOOL = Tool("torchtune", "*._component_", KEYS, DEFAULTS, finish, nested=True, interpolates=True)
