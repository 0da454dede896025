"""The recipe's schema: each setting once, with its type, default, unit and help. Docs, form and errors come from here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, WrapValidator, model_validator

AUTO: Any = "auto"  # stands in for any type until the planner has chosen
T = TypeVar("T")


def _auto_or(value: Any, handler: Any) -> Any:
    return AUTO if isinstance(value, str) and value.lower() == AUTO else handler(value)


#: A setting that the planner resolves when it is `auto`. After planning its value is a plain T.
AutoOr = Annotated[T, WrapValidator(_auto_or), PlainSerializer(lambda value: value, return_type=Any)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
Rows = Annotated[int, Field(ge=1, le=2**20)]

Dtype = Literal["bfloat16", "float16", "float32"]
Optimizer = Literal[
    "adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adafactor", "adamw_cpu_offload"
]
Checkpointing = bool | Literal["selective", "offload"]


class _Strict(BaseModel):
    """Unknown keys, yes/no in place of true/false, numbers as text and infinities are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class DatasetRecipe(_Strict):
    """Where the rows come from and how to read them."""

    path: str | list[str] = Field(
        description="Local .jsonl/.json/.csv/.parquet file(s), or a dataset id on the hub.", min_length=1
    )
    eval_path: str | list[str] | None = Field(None, description="Held-out rows: local file(s), or none.")
    name: str | None = Field(None, description="Configuration of a hub dataset.")
    split: str = Field("train", description="Split of a hub dataset to train on.")
    eval_split: str | None = Field(None, description="Split of a hub dataset to hold out.")
    revision: str | None = Field(None, description="Commit or tag of a hub dataset.")
    format: AutoOr[Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text"]] = Field(
        AUTO, description="Shape of the rows; auto looks at the columns."
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Your column names for the format's fields, e.g. {instruction: question, output: answer}.",
    )
    on_bad_rows: Literal["fail", "skip"] = Field("fail", description="What to do when rows can't be trained on.")
    test_split_size: float | int = Field(
        0, ge=0, description="Rows to hold out from the training file: a fraction below 1 or a count; 0 holds none out."
    )
    max_rows: Positive | None = Field(None, description="Use only the first so many rows.")


class LaunchRecipe(_Strict):
    """How many processes on how many machines; one process on one card by default."""

    num_processes: Positive = Field(1, description="Training processes in all, one per card.")
    num_machines: Positive = Field(1, description="Machines.")
    machine_rank: int = Field(0, ge=0, description="This machine's number, from 0.")
    main_process_ip: str = Field("127.0.0.1", description="Address of machine 0.")
    main_process_port: int = Field(29500, ge=1, le=65535, description="Port on machine 0.")
    strategy: Literal["ddp", "fsdp", "deepspeed"] = Field("ddp", description="How the work and the weights are shared.")
    zero_stage: Literal[2, 3] = Field(2, description="DeepSpeed ZeRO stage.")
    offload: Literal["none", "cpu", "nvme"] = Field("none", description="Where FSDP/DeepSpeed keep what is not in use.")
    nvme_path: str | None = Field(None, description="Directory for NVMe offload.")


class Recipe(_Strict):
    """What the user wants. `auto` leaves a setting to the planner, which says why it chose what it chose."""

    # -- model
    model_name_or_path: str = Field(min_length=1, description="Model folder, hub id, or `tiny` for the bundled base model.")
    model_revision: str | None = Field(None, description="Commit or tag of a hub model.")
    trust_remote_code: bool = Field(False, description="Run the model's own code; needs model_revision as a full commit.")
    dtype: AutoOr[Dtype] = Field(AUTO, description="Compute dtype and dtype of 16-bit weights.")
    attn_implementation: AutoOr[Literal["sdpa", "eager", "flash_attention_2", "torch_varlen"]] = Field(
        AUTO, description="Attention kernels."
    )
    # -- data
    dataset: DatasetRecipe = Field(description="The rows to learn from.")
    max_length: AutoOr[Annotated[int, Field(ge=8, le=2**24)]] = Field(AUTO, description="Longest row, in tokens.")
    excess_length: Literal["drop", "truncate", "raise"] = Field(
        "raise", description="Rows longer than max_length; always counted."
    )
    train_on_inputs: bool = Field(False, description="Also learn the user's side; by default only the answers.")
    chat_template: str | None = Field(None, description="Path of a Jinja chat template to use in place of the model's.")
    packing: AutoOr[bool] = Field(AUTO, description="Put several rows into one sequence of max_length.")
    # -- adapter
    load_in_4bit: AutoOr[bool] = Field(AUTO, description="QLoRA: base weights in NF4 with double quantisation.")
    load_in_8bit: AutoOr[bool] = Field(AUTO, description="Base weights in int8.")
    lora_r: AutoOr[Annotated[int, Field(ge=1, le=8192)]] = Field(AUTO, description="Rank of the adapters.")
    lora_alpha: AutoOr[Annotated[float, Field(gt=0)]] = Field(AUTO, description="Scale of the adapters: alpha / r.")
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="Dropout before the adapters; costs memory.")
    target_modules: AutoOr[str | list[str]] = Field(AUTO, description="Layers that get an adapter: all-linear, or names.")
    use_dora: bool = Field(False, description="Weight-decomposed LoRA.")
    use_rslora: bool = Field(False, description="Rank-stabilised scale: alpha / sqrt(r).")
    # -- training
    effective_batch_size: AutoOr[Rows] = Field(AUTO, description="Rows per optimizer step, over all cards.")
    per_device_train_batch_size: AutoOr[Rows] = Field(AUTO, description="Micro-batch: rows in memory at once.")
    gradient_accumulation_steps: AutoOr[Rows] = Field(AUTO, description="Micro-batches per optimizer step.")
    num_train_epochs: Annotated[float, Field(gt=0, le=1e6)] = Field(2.0, description="Passes over the data.")
    max_steps: Positive | None = Field(None, description="Optimizer steps; overrides num_train_epochs.")
    learning_rate: AutoOr[Annotated[float, Field(gt=0, lt=1)]] = Field(AUTO, description="Peak learning rate.")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = Field(
        "cosine", description="Schedule."
    )
    warmup_ratio: Fraction = Field(0.03, description="Share of the steps spent warming up.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight decay of the adapters.")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(1.0, description="Gradients are clipped to this norm.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(42, description="Seed of everything random.")
    # -- memory
    optim: AutoOr[Optimizer] = Field(AUTO, description="Optimizer.")
    activation_checkpointing: AutoOr[Checkpointing] = Field(
        AUTO,
        description="Recompute activations: false, true, selective (keep attention outputs), offload (inputs to host memory).",
    )
    activation_checkpointing_every_n_layers: AutoOr[Positive] = Field(AUTO, description="Recompute only every n-th layer.")
    activation_offloading: bool = Field(False, description="Move every saved activation to host memory.")
    int8_activations: bool = Field(False, description="Keep saved activations as blockwise int8.")
    torch_compile: bool = Field(False, description="Compile each decoder layer.")
    gpu: str = Field(
        AUTO, min_length=1, description="Card: auto (this machine's), cpu, or a name of the catalogue, e.g. rtx-4090."
    )
    memory_budget: AutoOr[str] = Field(AUTO, description="Most memory of the card to use, e.g. 20GiB; auto is what is free.")
    # -- run
    output_dir: AutoOr[str] = Field(AUTO, min_length=1, description="Run directory; auto is runs/<model>-<time>.")
    eval_steps: AutoOr[Annotated[int, Field(ge=0)]] = Field(AUTO, description="Steps between evaluations; 0 never.")
    sample_answers: Annotated[int, Field(ge=0, le=16)] = Field(3, description="Held-out prompts answered at each evaluation.")
    save_steps: AutoOr[Annotated[int, Field(ge=0)]] = Field(AUTO, description="Steps between checkpoints; 0 only at the end.")
    loss_spike_factor: Annotated[float, Field(gt=1)] | None = Field(
        None, description="A loss so many times its recent median goes back to the last checkpoint with half the learning rate."
    )
    record_memory_history: bool = Field(False, description="Keep the CUDA allocator's history for `finetune snapshot`.")
    save_total_limit: Positive = Field(2, description="Checkpoints kept.")
    per_device_eval_batch_size: AutoOr[Positive] = Field(AUTO, description="Rows in memory at once in evaluation.")
    dataloader_num_workers: int = Field(0, ge=0, le=64, description="Processes that load batches.")
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default_factory=list, description="Trackers to log to, too."
    )
    launch: LaunchRecipe = Field(default=LaunchRecipe(), description="Many cards or machines.")

    @model_validator(mode="after")
    def _settings_agree(self) -> Recipe:
        problems = list(_disagreements(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _disagreements(recipe: Recipe) -> Any:
    """Settings that can't both be meant. Yields one line each."""
    if recipe.load_in_4bit is True and recipe.load_in_8bit is True:
        yield "load_in_4bit and load_in_8bit are both true; keep one of them"
    micro, steps, batch = recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps, recipe.effective_batch_size
    world = recipe.launch.num_processes
    if AUTO not in (micro, steps, batch) and micro * steps * world != batch:
        yield (
            f"effective_batch_size {batch} is not per_device_train_batch_size {micro} x gradient_accumulation_steps {steps}"
            f" x {world} process(es) = {micro * steps * world}; leave one of them out"
        )
    if batch != AUTO:
        for name, part in (("per_device_train_batch_size", micro), ("gradient_accumulation_steps", steps)):
            if part != AUTO and batch % (part * world):
                yield f"effective_batch_size {batch} can't be divided by {name} {part} on {world} process(es)"
    if recipe.trust_remote_code and not _is_commit(recipe.model_revision):
        yield "trust_remote_code runs code from the hub: pin it with model_revision set to a full 40-character commit"
    if any(len(part.encode("utf-8", "replace")) > 255 for part in recipe.output_dir.split("/")):
        yield "output_dir has a name of more than 255 bytes, which no file system takes"
    if recipe.memory_budget != AUTO:
        from finetune.units import parse_bytes

        try:
            parse_bytes(recipe.memory_budget)
        except ValueError as error:
            yield f"memory_budget: {error}"


def _is_commit(text: str | None) -> bool:
    return text is not None and len(text) == 40 and all(letter in "0123456789abcdef" for letter in text)


#: What other tools call the same setting -> our name.
ALIASES = {
    "base_model": "model_name_or_path", "model": "model_name_or_path", "model_id": "model_name_or_path",
    "revision": "model_revision", "torch_dtype": "dtype", "attn_impl": "attn_implementation",
    "cutoff_len": "max_length", "sequence_len": "max_length", "max_seq_length": "max_length", "max_seq_len": "max_length",
    "block_size": "max_length", "excess_length_strategy": "excess_length", "truncation_strategy": "excess_length",
    "sample_packing": "packing",
    "lora_rank": "lora_r", "lora_target_modules": "target_modules", "lora_target": "target_modules",
    "peft_use_dora": "use_dora", "peft_use_rslora": "use_rslora",
    "micro_batch_size": "per_device_train_batch_size", "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size", "global_batch_size": "effective_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps", "num_epochs": "num_train_epochs", "epochs": "num_train_epochs",
    "lr": "learning_rate", "lr_scheduler": "lr_scheduler_type", "optimizer": "optim",
    "gradient_checkpointing": "activation_checkpointing", "out_dir": "output_dir",
}  # fmt: skip


def resolved(recipe: Recipe, **choices: Any) -> Recipe:
    """A copy of `recipe` with `choices` filled in, validated. Raises ValueError when they don't agree."""
    return Recipe.model_validate({**recipe.model_dump(exclude_unset=True), **choices})


def unresolved(recipe: Recipe) -> list[str]:
    """Names of the settings that are still `auto`."""
    return [name for name in Recipe.model_fields if getattr(recipe, name) == AUTO]
