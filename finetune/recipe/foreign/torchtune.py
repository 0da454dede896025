"""torchtune: the YAML of its LoRA recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.recipe.foreign.rules import Ignore, Keep, Read, Reading, Refuse, Rule, Tool, listed
from finetune.recipe.foreign.shared import EVERY_STEP, KERNELS, MEMORY, NOT_TRAINED, PROCESS, read_batch, read_dtype

_FOUND = Ignore("is read from the model")

KEYS: dict[str, Rule] = {
    "output_dir": Keep("output_dir"), "model._component_": Read(), "model.lora_attn_modules": Read(),
    "model.apply_lora_to_mlp": Read(),
    "model.apply_lora_to_output": Refuse("the output layer gets no adapter"), "model.lora_rank": Keep("lora_r"),
    "model.lora_alpha": Keep("lora_alpha"),
    "model.lora_dropout": Keep("lora_dropout", float), "model.use_dora": Keep("use_dora"),
    "model.quantize_base": Keep("load_in_4bit"),
    "tokenizer._component_": _FOUND, "tokenizer.path": _FOUND, "tokenizer.merges_file": _FOUND,
    "tokenizer.max_seq_len": Keep("max_length"),
    "tokenizer.prompt_template": Refuse("the model's own chat template is used", lifted_by="chat_template"),
    "tokenizer.*": _FOUND,
    "checkpointer.checkpoint_dir": Read(),
    "checkpointer.adapter_checkpoint": Refuse("in a recipe it is adapter=FOLDER"), "checkpointer.*": _FOUND,
    "resume_from_checkpoint": Refuse("a new run starts from the beginning; `finetune resume RUN` goes on"),
    "save_adapter_weights_only": PROCESS,
    "should_load_recipe_state": PROCESS, "dataset._component_": Read(), "dataset.source": Read(), "dataset.data_files": Read(),
    "dataset.split": Keep("dataset.split"),
    "dataset.packed": Keep("packing"), "dataset.train_on_input": Keep("train_on_inputs"),
    "dataset.conversation_column": Read(), "dataset.conversation_style": Read(),
    "dataset.column_map.*": Read(), "dataset.column": Read(),
    "dataset.*": Refuse("changes what rows look like", lifted_by="dataset.path"),
    "dataset_val.*": Ignore("set dataset.eval_path"),
    "run_val_every_n_steps": Ignore("the plan chooses how often; set eval_steps"), "batch_size_val": MEMORY,
    "seed": Keep("seed"), "shuffle": Refuse("rows are shuffled", (True,)), "batch_size": Read(),
    "gradient_accumulation_steps": Read(), "collate_fn": PROCESS,
    "optimizer._component_": Read(), "optimizer.lr": Keep("learning_rate", float),
    "optimizer.weight_decay": Keep("weight_decay", float), "optimizer.fused": KERNELS,
    "optimizer.*": Refuse("finetune's AdamW has PyTorch's betas and epsilon"), "optimizer_in_bwd": MEMORY,
    "lr_scheduler._component_": Read(), "lr_scheduler.num_warmup_steps": Keep("warmup_steps"),
    "lr_scheduler.*": Refuse("changes the schedule"),
    "loss._component_": Refuse("the loss is the cross entropy", tuple(f"torchtune.modules.loss.{name}" for name in (
        "CEWithChunkedOutputLoss", "LinearCrossEntropyLoss")) + ("torch.nn.CrossEntropyLoss",)), "loss.*": KERNELS,
    "epochs": Keep("num_train_epochs", float), "max_steps_per_epoch": Read(), "clip_grad_norm": Keep("max_grad_norm", float),
    "compile": KERNELS,
    "metric_logger.*": EVERY_STEP, "log_every_n_steps": EVERY_STEP, "log_peak_memory_stats": EVERY_STEP,
    "log_level": EVERY_STEP, "profiler.*": EVERY_STEP,
    "save_every_n_steps": Keep("save_steps"), "device": PROCESS, "dtype": Keep("dtype"),
    "enable_activation_checkpointing": MEMORY, "enable_activation_offloading": MEMORY,
    "low_cpu_ram": MEMORY, "fsdp_cpu_offload": MEMORY, "custom_sharded_layers": MEMORY, "data_parallel_shard_dim": MEMORY,
    "data_parallel_replicate_dim": MEMORY,
    "tensor_parallel_dim": MEMORY, "teacher_model.*": NOT_TRAINED, "kd_ratio": NOT_TRAINED, "kd_loss.*": NOT_TRAINED,
    "quantizer.*": NOT_TRAINED,
}  # fmt: skip

DEFAULTS: dict[str, Any] = {
    "num_train_epochs": 1.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.0, "weight_decay": 0.01,
    "optim": "adamw_torch_fused", "max_grad_norm": 1e9,
    "excess_length": "truncate", "lora_r": 8, "lora_alpha": 16.0, "lora_dropout": 0.0, "load_in_4bit": False,
    "load_in_8bit": False, "packing": False,
}  # fmt: skip

_MODULES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]
_OPTIMIZERS = {
    "torch.optim.AdamW": "adamw_torch_fused", "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW": "paged_adamw_32bit",
}  # fmt: skip
#: Datasets with a source of their own: path, format, whether prompts are learnt.
_DATASETS = {
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca", True), "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca", True),
    "chat_dataset": ("", "messages", False), "instruct_dataset": ("", "alpaca", False),
    "text_completion_dataset": ("", "text", True),
}  # fmt: skip


def finish(reading: Reading) -> None:
    """What torchtune's keys mean together."""
    read_batch(reading, "batch_size", "gradient_accumulation_steps")
    _model(reading)
    component = str(reading.value("optimizer._component_", "torch.optim.AdamW"))
    if "optimizer._component_" in reading.values:
        if component in _OPTIMIZERS:
            reading.keep("optimizer._component_", "optim", _OPTIMIZERS[component])
        else:
            reading.refuse("optimizer._component_", f"one of {', '.join(_OPTIMIZERS)} is supported", "optim")
    if "lr_scheduler._component_" in reading.values:
        if str(reading.value("lr_scheduler._component_")).endswith("get_cosine_schedule_with_warmup"):
            reading.keep("lr_scheduler._component_", "lr_scheduler_type", "cosine")
        else:
            reading.refuse("lr_scheduler._component_", "changes the schedule", "lr_scheduler_type")
    elif "lr_scheduler_type" not in reading.settings:
        reading.assume("lr_scheduler_type", "constant")
    if (most := reading.value("max_steps_per_epoch")) is not None:
        if float(reading.value("epochs", 1)) == 1:
            reading.keep("max_steps_per_epoch", "max_steps", most)
        else:
            reading.refuse("max_steps_per_epoch", "each epoch is cut there", "max_steps")
    read_dtype(reading)
    _dataset(reading)


def _model(reading: Reading) -> None:
    component = str(reading.value("model._component_", ""))
    name = component.rpartition(".")[2]
    if name.startswith("qlora_"):
        reading.keep("model._component_", "load_in_4bit", True)
    elif name.startswith("lora_"):
        reading.ignore("model._component_", "the model is checkpointer.checkpoint_dir")
    else:
        reading.refuse("model._component_", "finetune trains LoRA adapters: lora_... or qlora_...")
    if "checkpointer.checkpoint_dir" in reading.values:
        folder = str(reading.value("checkpointer.checkpoint_dir"))
        found = (Path(folder).expanduser() / "config.json").is_file()
        note = "" if found else f"{folder} is not here: the model of that name"
        reading.keep("checkpointer.checkpoint_dir", "model_name_or_path", folder if found else Path(folder).name, note)
    targets = [_MODULES[part] for part in listed(reading.value("model.lora_attn_modules", [])) if part in _MODULES]
    targets += _MLP if reading.is_on("model.apply_lora_to_mlp") else []
    for key in ("model.lora_attn_modules", "model.apply_lora_to_mlp"):
        if key in reading.values:
            reading.keep(key, "target_modules", targets)


def _dataset(reading: Reading) -> None:
    together = ("_component_", "source", "data_files", "conversation_column", "conversation_style", "column")
    keys = [key for key in reading.values if key.removeprefix("dataset.") in together or key.startswith("dataset.column_map.")]
    if reading.is_replaced("dataset.path", keys):
        return
    name = str(reading.value("dataset._component_", "")).rpartition(".")[2]
    if name not in _DATASETS:
        reading.refuse("dataset._component_", "finetune doesn't know what its rows look like", "dataset.path")
        for key in set(keys) - {"dataset._component_"}:
            reading.share(key, "dataset._component_")
        return
    path, row_format, prompts = _DATASETS[name]
    if reading.value("dataset.conversation_style") == "sharegpt":
        row_format = "sharegpt"
    source = reading.value("dataset.source", path)
    reading.settings["dataset.path"] = (
        reading.value("dataset.data_files", source) if source in ("json", "csv", "parquet") else source
    )
    reading.settings["dataset.format"] = row_format
    reading.assume("train_on_inputs", prompts)
    columns = {key.rpartition(".")[2]: value for key, value in reading.values.items() if key.startswith("dataset.column_map.")}
    columns = {{"output": "output", "input": "instruction"}.get(ours, ours): column for ours, column in columns.items()}
    columns |= {"text": reading.value("dataset.column")} if "dataset.column" in reading.values else {}
    field = "conversations" if row_format == "sharegpt" else "messages"
    columns |= (
        {field: reading.value("dataset.conversation_column")}
        if reading.value("dataset.conversation_column", field) != field
        else {}
    )
    if columns:
        reading.settings["dataset.columns"] = columns
    for key in keys:
        reading.share(key, f"dataset.path {reading.settings['dataset.path']}")
        reading.origin["dataset.path"] = key


TOOL = Tool("torchtune", frozenset({"*._component_"}), KEYS, DEFAULTS, finish, nested=True)
