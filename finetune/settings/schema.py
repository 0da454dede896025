"""The recipe's schema: type, default, unit, help, group and effects of each setting."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from enum import Flag, auto
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WrapValidator, model_validator
from pydantic.fields import FieldInfo

from finetune.settings import compatibility
from finetune.settings.base_formats import AUTO
from finetune.settings.methods import METHODS, USUAL_VALUES
from finetune.settings.optimizers import OPTIMIZERS

_TOKEN_CHARACTERS = 200
T = TypeVar("T")
# Docs, command line, form, errors, cache keys and checkpoint seals are derived from the rows below.


def _auto_or(value: Any, handler: Any) -> Any:
    return AUTO if isinstance(value, str) and value.lower() == AUTO else handler(value)


def _in_gib(value: Any) -> Any:
    if type(value) not in (int, float):
        return value
    return f"{value:g}GiB" if value < 10_000 else str(round(value))


def _synonyms(names: dict[str, Any]) -> BeforeValidator:
    return BeforeValidator(lambda value: names.get(value.lower(), value) if isinstance(value, str) else value)


def _trackers(value: Any) -> Any:
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    return [name for name in names if name != "none"] if isinstance(names, list) else names


def _layers(value: Any) -> Any:
    if value in ("all", ["all"], "all_linear", ["all-linear"]):
        return "all-linear"
    # a regular expression stays one text
    is_list = isinstance(value, str) and "," in value and not set(value) & set("()[]{}|*+?\\^$")
    return [name.strip() for name in value.split(",") if name.strip()] if is_list else value


def _tokens(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list):
        if repeated := sorted({str(name) for name, count in Counter(map(str, names)).items() if count > 1}):
            raise ValueError(f"has {', '.join(repeated[:5])} more than once")
        if not all(isinstance(name, str) for name in names):
            raise ValueError("give a list of tokens, or a mapping of tokens to the text that they stand for")
        names = dict.fromkeys(names, "")
    for name in names if isinstance(names, dict) else ():
        is_text = isinstance(name, str) and name == name.strip() and name.isprintable()
        if not is_text or not 0 < len(name) <= _TOKEN_CHARACTERS:
            raise ValueError(
                f"{str(name)[:60]!r} is no token: give printable text of at most {_TOKEN_CHARACTERS} characters, "
                "without white space at its ends"
            )
    return {name: text or "" for name, text in names.items()} if isinstance(names, dict) else names


#: A setting that the planner resolves if `auto`; after planning the value is a plain T.
AutoOr = Annotated[T, WrapValidator(_auto_or), PlainSerializer(lambda value: value, return_type=Any)]


def takes_auto(field: FieldInfo) -> bool:
    """Tell whether a field is an AutoOr."""
    return any(getattr(validator, "func", None) is _auto_or for validator in field.metadata)


#: Text that may look like a number: `gpu: 4090`, `output_dir: 2024`.
Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
#: A size in bytes with its unit; a bare number of up to four digits is GiB.
Size = Annotated[str, BeforeValidator(_in_gib)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
Rows = Annotated[int, Field(ge=1, le=2**20)]

Dtype = Annotated[
    Literal["bfloat16", "float16", "float32"],
    _synonyms({
        "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
        "torch.bfloat16": "bfloat16", "torch.float16": "float16", "torch.float32": "float32",
    }),
]  # fmt: skip
if TYPE_CHECKING:
    _OptimizerName = str
    _MethodName = str
    PreferenceLoss = str
else:
    _OptimizerName = Literal[tuple(OPTIMIZERS)]
    _MethodName = Literal[tuple(METHODS)]
    PreferenceLoss = Literal[tuple(loss for method in METHODS.values() for loss in method.losses)]
Optimizer = Annotated[
    _OptimizerName, _synonyms({synonym: name for name, optimizer in OPTIMIZERS.items() for synonym in optimizer.synonyms})
]
Trackers = Annotated[list[Literal["tensorboard", "wandb", "trackio"]], BeforeValidator(_trackers)]
Layers = Annotated[str | list[str], BeforeValidator(_layers)]
NewTokens = Annotated[dict[str, str], BeforeValidator(_tokens)]
Row = Annotated[int, Field(ge=0, lt=2**31)]
RowFormat = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "xlam", "text", "preference", "labelled"]
Checkpointing = bool | Literal["selective", "offload"]


class Decides(Flag):
    """The effects of a setting."""

    NOTHING = 0
    #: Training tokens and their labels.
    TOKENS = auto()
    #: Parameters, their shapes and dtypes.
    PARAMETERS = auto()
    #: Device and host memory.
    BYTES = auto()
    #: Step time.
    SPEED = auto()
    #: The trained adapter; a checkpoint made with another value can't be continued.
    RESULT = auto()
    #: Rounding, or choices that a retry may change; a checkpoint made with another value can be continued, but not bit-exactly.
    EXACTNESS = auto()


NOTHING = Decides.NOTHING
TOKENS, PARAMETERS, BYTES, SPEED, RESULT, EXACTNESS = list(Decides)
COST = BYTES | SPEED
#: Share of rows held out by default, from this number of rows on.
DEFAULT_SHARE, LEAST_ROWS = 0.1, 50
#: Titles of the groups of settings, in the order shown.
GROUPS = ("Model", "Data", "Adapter", "Training", "Memory", "Run", "Several GPUs or machines")


def _setting(group: str, default: Any, decides: Decides, description: str, **limits: Any) -> Any:
    row: Any = {"group": group, "decides": [effect.name.lower() for effect in decides if effect.name]}
    return Field(default, description=description, json_schema_extra=row, **limits)


_model, _data, _adapter, _training, _memory, _run, _launch = (functools.partial(_setting, group) for group in GROUPS)


class _Strict(BaseModel):
    """Refuse unknown keys, yes/no for true/false, numbers as text, and infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class DatasetRecipe(_Strict):
    """Where the rows come from and how to read them."""

    path: str | list[str] = _data(
        ..., TOKENS | BYTES | RESULT, "Local file(s), a folder or a pattern (*.jsonl), or a hub dataset's id.", min_length=1
    )
    eval_path: str | list[str] | None = _data(None, TOKENS, "Held-out rows: local file(s), or none.")
    name: str | None = _data(None, TOKENS | RESULT, "Configuration of a hub dataset.")
    split: str = _data("train", TOKENS | RESULT, "Split to train on, of a hub dataset, a saved folder, a file with splits.")
    eval_split: str | None = _data(None, TOKENS, "Split to hold out, of the same dataset, folder or file.")
    revision: str | None = _data(None, TOKENS | RESULT, "Commit or tag of a hub dataset.")
    format: AutoOr[RowFormat] = _data(AUTO, TOKENS | RESULT, "Row format; auto detects it from the columns.")
    columns: dict[str, str] = _data(
        {}, TOKENS | RESULT, "Your column names for the format's fields, e.g. {instruction: question, output: answer}."
    )
    weights: list[Annotated[float, Field(gt=0, le=100)]] | None = _data(
        None, TOKENS | RESULT, "How often each row of each path is used in an epoch: 0.5 a half of them, by seed; 2 all twice."
    )
    ignore_columns: list[str] = _data(
        [], TOKENS | RESULT, "Columns and fields of messages to leave out on purpose, e.g. [label, reasoning_content]."
    )
    json_columns: list[str] = _data(
        [], TOKENS | RESULT, "Columns, and fields of messages, whose objects and numbers are written as JSON, e.g. [output]."
    )
    image_folder: str | None = _data(
        None, TOKENS | RESULT, "Folder where paths of pictures start, if not the data file's; none outside of both is read."
    )
    on_bad_rows: Literal["fail", "skip"] = _data(
        "fail", TOKENS | RESULT, "Rows that can't be trained on: fail refuses to start, skip leaves them out."
    )
    accept_findings: list[Literal["leak", "truncated", "replaced", "one label", "contradictions"]] = _data(
        [], NOTHING, "Findings of the data doctor that stop a run, to train on the rows as they are."
    )
    test_split_size: float | int | None = _data(
        None, TOKENS | RESULT, "Rows to hold out: a fraction below 1 or a count; 0 is none, null 0.1 of 50 rows or more.", ge=0
    )
    max_rows: Positive | None = _data(None, TOKENS | RESULT, "Use only this many rows, from the first.")


class LaunchRecipe(_Strict):
    """How many processes on how many machines; one process on one GPU by default."""

    num_processes: Positive = _launch(1, COST | EXACTNESS, "World size: training processes on all machines, one per GPU.")
    num_machines: Positive = _launch(1, SPEED, "Number of machines.")
    machine_rank: int = _launch(0, NOTHING, "Rank of this machine, from 0.", ge=0)
    main_process_ip: str = _launch("127.0.0.1", NOTHING, "Address of machine 0.")
    main_process_port: int = _launch(29500, NOTHING, "Port on machine 0.", ge=1, le=65535)
    strategy: Literal["ddp", "fsdp", "deepspeed"] = _launch(
        "ddp", COST | EXACTNESS, "ddp copies the model to every GPU; fsdp and deepspeed shard it."
    )
    zero_stage: Literal[2, 3] = _launch(2, COST | EXACTNESS, "DeepSpeed ZeRO stage.")
    offload: Literal["none", "cpu", "nvme"] = _launch(
        "none", COST | EXACTNESS, "Where FSDP or DeepSpeed offload what they shard."
    )
    nvme_path: str | None = _launch(None, NOTHING, "Directory for NVMe offload.")

    @property
    def processes_here(self) -> int:
        return max(1, self.num_processes // self.num_machines)


class Recipe(_Strict):
    """The user's choices. `auto` leaves a setting to the planner, which gives a reason for its choice."""

    # -- model
    model_name_or_path: str = _model(
        ..., TOKENS | PARAMETERS | COST | RESULT, "Model folder, hub id, or `tiny` for the bundled base model.", min_length=1
    )
    model_revision: str | None = _model(None, TOKENS | PARAMETERS | COST | RESULT, "Commit or tag of a hub model.")
    trust_remote_code: bool = _model(
        False, PARAMETERS | COST | RESULT, "Run the model's own code; needs model_revision as a full commit."
    )
    dtype: AutoOr[Dtype] = _model(
        AUTO, PARAMETERS | COST | RESULT, "Dtype of computation and of weights that are not quantised."
    )
    attn_implementation: AutoOr[Literal["sdpa", "eager", "flash_attention_2", "torch_varlen"]] = _model(
        AUTO, COST | EXACTNESS, "Attention kernels."
    )
    vision: AutoOr[bool] = _model(
        AUTO, PARAMETERS | COST | RESULT, "Load the vision tower, too, for rows with pictures; auto: if the rows have some."
    )
    # -- data
    dataset: DatasetRecipe = Field(description="Training and held-out rows.")
    max_length: AutoOr[Annotated[int, Field(ge=8, le=2**24)]] = _data(AUTO, TOKENS | COST | RESULT, "Longest row, in tokens.")
    excess_length: Literal["drop", "truncate", "chunk", "raise"] = _data(
        "raise",
        TOKENS | RESULT,
        "Rows longer than max_length: drop, truncate, chunk (plain text into several; usual for pretrain), or raise an error.",
    )
    max_pixels: AutoOr[Annotated[int, Field(ge=1024, le=2**26)] | None] = _data(
        AUTO,
        TOKENS | COST | RESULT,
        "Larger pictures are scaled down to so many pixels, before the model's own processor; auto: if they don't fit.",
    )
    train_on_inputs: bool = _data(False, TOKENS | RESULT, "Train on prompts, too; by default only on answers.")
    chat_template: str | None = _data(
        None, TOKENS | RESULT, "Chat template instead of the model's: path of a Jinja file, or plain."
    )
    packing: AutoOr[bool] = _data(AUTO, COST | RESULT, "Pack several rows into one sequence of max_length.")
    # -- adapter
    adapter_name_or_path: Text | None = _adapter(
        None, RESULT, "Continue training this adapter: a run, or a folder; its rank, scale and layers are used.", min_length=1
    )
    load_in_4bit: AutoOr[bool] = _adapter(
        AUTO, PARAMETERS | COST | RESULT, "QLoRA: base weights in NF4 with double quantisation."
    )
    load_in_8bit: AutoOr[bool] = _adapter(AUTO, PARAMETERS | COST | RESULT, "Base weights in int8.")
    lora_r: AutoOr[Annotated[int, Field(ge=1, le=8192)]] = _adapter(AUTO, PARAMETERS | COST | RESULT, "Rank of the adapters.")
    lora_alpha: AutoOr[Annotated[float, Field(gt=0)]] = _adapter(AUTO, RESULT, "Scale of the adapters: alpha / r.")
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = _adapter(
        0.0, COST | RESULT, "Dropout before the adapters; costs memory."
    )
    target_modules: AutoOr[Layers] = _adapter(
        AUTO, PARAMETERS | COST | RESULT, "Layers that get an adapter: all-linear, or names."
    )
    new_tokens: NewTokens = _adapter(
        {},
        TOKENS | RESULT,
        "Tokens that the model lacks, whose rows of the embedding are trained: a list, or each with the text it stands for.",
    )
    trained_embedding_rows: list[Row] = _adapter(
        [],
        PARAMETERS | COST | RESULT,
        "Rows of the embedding that are trained, as first and end. The plan takes them from the tokenizer.",
        max_length=2,
    )
    train_vision: Literal["none", "projector", "all"] = _adapter(
        "none",
        PARAMETERS | COST | RESULT,
        "Adapters beside those of the language model: none, on the projector, or on all of the vision tower.",
    )
    use_dora: bool = _adapter(False, PARAMETERS | COST | RESULT, "DoRA: weight-decomposed LoRA.")
    use_rslora: bool = _adapter(False, RESULT, "rsLoRA: scale alpha / sqrt(r).")
    adapter_dtype: Literal["float32", "bfloat16"] = _adapter(
        "float32",
        COST | RESULT,
        "Adapters, gradients and optimizer states; bfloat16 halves them and rounds small updates away.",
    )
    # -- training
    method: AutoOr[_MethodName] = _training(
        "sft",
        TOKENS | COST | RESULT,
        "sft learns answers; pretrain all of plain text (column text); dpo to prefer the chosen of two answers (columns "
        "chosen, rejected); kto learns from answers marked good or bad (column label). auto: by the columns of the rows.",
    )
    beta: Annotated[float, Field(gt=0, le=100)] | None = _training(
        None, RESULT, "dpo, kto: how closely the model stays to the one before the training; more is closer. By default 0.1."
    )
    loss_type: PreferenceLoss | None = _training(
        None,
        COST | RESULT,
        "dpo: the loss on a pair, by default sigmoid. kto: kto, or apo_zero_unpaired, which has no KL term.",
    )
    label_smoothing: Annotated[float, Field(gt=0, lt=0.5)] | None = _training(
        None, RESULT, "dpo with loss_type robust: the share of pairs that are in the wrong order."
    )
    sft_weight: Annotated[float, Field(ge=0, le=100)] | None = _training(
        None, RESULT, "dpo: weight of SFT's loss on the chosen answers, which keeps them likely; a mean over their tokens."
    )
    desirable_weight: Annotated[float, Field(gt=0, le=100)] | None = _training(
        None, RESULT, "kto: weight of the loss of good answers. By default 1."
    )
    undesirable_weight: Annotated[float, Field(gt=0, le=100)] | None = _training(
        None, RESULT, "kto: weight of the loss of bad answers. By default 1."
    )
    effective_batch_size: AutoOr[Rows] = _training(AUTO, SPEED | RESULT, "Rows per optimizer step, on all GPUs together.")
    per_device_train_batch_size: AutoOr[Rows] = _training(AUTO, COST | EXACTNESS, "Micro-batch: rows per forward pass and GPU.")
    gradient_accumulation_steps: AutoOr[Rows] = _training(AUTO, COST | EXACTNESS, "Micro-batches per optimizer step.")
    num_train_epochs: Annotated[float, Field(gt=0, le=1e6)] = _training(2.0, RESULT, "Passes over the data.")
    max_steps: Positive | None = _training(None, RESULT, "Optimizer steps; overrides num_train_epochs.")
    learning_rate: AutoOr[Annotated[float, Field(gt=0, lt=1)]] = _training(AUTO, EXACTNESS, "Peak learning rate.")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = _training(
        "cosine", RESULT, "Learning rate schedule."
    )
    warmup_ratio: Fraction = _training(0.03, RESULT, "Share of the steps used for learning rate warmup.")
    warmup_steps: Annotated[int, Field(ge=0)] | None = _training(
        None, RESULT, "Steps of learning rate warmup; overrides warmup_ratio."
    )
    weight_decay: Annotated[float, Field(ge=0)] = _training(0.0, RESULT, "Weight decay of the adapters.")
    max_grad_norm: Annotated[float, Field(gt=0)] = _training(1.0, RESULT, "Gradients are clipped to this norm.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = _training(42, TOKENS | RESULT, "Seed of everything random.")
    # -- memory
    optim: AutoOr[Optimizer] = _memory(AUTO, COST | RESULT, "Optimizer.")
    activation_checkpointing: AutoOr[Checkpointing] = _memory(
        AUTO,
        COST | EXACTNESS,
        "Gradient checkpointing: false, true, selective (keep attention outputs), offload (layer inputs to host memory).",
    )
    activation_checkpointing_every_n_layers: AutoOr[Positive] = _memory(
        AUTO, COST | EXACTNESS, "Gradient checkpointing only in every n-th layer."
    )
    activation_offloading: bool = _memory(False, COST | EXACTNESS, "Offload every saved activation to host memory.")
    int8_activations: bool = _memory(False, COST | RESULT, "Store saved activations as blockwise int8.")
    lean_layers: AutoOr[bool] = _memory(
        AUTO, COST | EXACTNESS, "Layers that save about half the activations for backward, where they are recognised."
    )
    mlp_tile_tokens: AutoOr[Annotated[int, Field(ge=0)]] = _memory(
        AUTO,
        COST | EXACTNESS,
        "Lean MLPs of recomputed layers work on tiles of so many tokens, for long rows; 0 is on all tokens at once.",
    )
    precompute_ref_log_probs: AutoOr[bool] = _memory(
        False,
        COST | EXACTNESS,
        "dpo: compute the reference once, before the training, in place of a forward pass in each step. auto: where rows are "
        "trained more than once.",
    )
    offload_embeddings: AutoOr[bool] = _memory(
        AUTO, COST, "The input embedding in host memory, where the output layer does not share it."
    )
    layer_offloading: AutoOr[Literal[False, "cpu", "nvme"]] = _memory(
        AUTO, COST, "Frozen weights of decoder layers: false (on the GPU), cpu (in host memory), nvme (in a file)."
    )
    offloaded_layers: AutoOr[Annotated[int, Field(ge=0)]] = _memory(
        AUTO, COST, "How many decoder layers layer_offloading moves; the others stay on the GPU. 0 without it."
    )
    torch_compile: AutoOr[bool] = _memory(
        AUTO, COST | EXACTNESS, "Compile the decoder layers; auto is where they compile, fit, and save more time than it takes."
    )
    gpu: Text = _memory(
        AUTO,
        COST | EXACTNESS,
        "GPU: auto (this machine's), cpu, an index or UUID of nvidia-smi, or a catalogue name, e.g. rtx-4090.",
        min_length=1,
    )
    memory_budget: AutoOr[Size] = _memory(AUTO, NOTHING, "Most GPU memory to use, e.g. 20GiB; auto is all that is free.")
    host_memory: Size | None = _memory(
        None, NOTHING, "Most host memory for what is offloaded, e.g. 32GiB; else all that is free, or any for a GPU elsewhere."
    )
    # -- run
    output_dir: AutoOr[Text] = _run(AUTO, NOTHING, "Run directory; auto is runs/<model>-<digest of the recipe>.", min_length=1)
    eval_steps: AutoOr[Annotated[int, Field(ge=0)]] = _run(
        AUTO, BYTES | EXACTNESS, "Steps between evaluations; 0 is never. The step with the lowest held-out loss is the result."
    )
    early_stopping_patience: Positive | None = _run(
        None, EXACTNESS, "End the run after this many evaluations without a lower held-out loss."
    )
    sample_answers: AutoOr[Annotated[int, Field(ge=0, le=16)]] = _run(
        AUTO, NOTHING, "Held-out prompts answered at each evaluation; auto is 3, and 0 with layer_offloading."
    )
    save_steps: AutoOr[Annotated[int, Field(ge=0)]] = _run(AUTO, NOTHING, "Steps between checkpoints; 0 is only at the end.")
    loss_spike_factor: Annotated[float, Field(gt=1)] | None = _run(
        None,
        NOTHING,
        "When the loss is this many times its recent median: back to the last checkpoint, half the learning rate.",
    )
    record_memory_history: bool = _run(
        False, NOTHING, "Record the CUDA allocator's history, to look at in torch's memory viewer."
    )
    save_total_limit: Positive = _run(2, NOTHING, "Newest checkpoints kept; the best one is kept beside them.")
    per_device_eval_batch_size: AutoOr[Positive] = _run(AUTO, BYTES | EXACTNESS, "Micro-batch of evaluation.")
    dataloader_num_workers: int = _run(0, SPEED, "Processes that load batches.", ge=0, le=64)
    report_to: Trackers = _run([], NOTHING, "Experiment trackers to log to.")
    price_per_hour: Annotated[float, Field(ge=0)] | None = _run(
        None, NOTHING, "What an hour of this machine costs; plan, run and report then say what the run costs."
    )
    launch: LaunchRecipe = Field(default=LaunchRecipe(), description="Several GPUs or machines.")

    @model_validator(mode="before")
    @classmethod
    def _usual_values(cls, values: Any) -> Any:
        return {**USUAL_VALUES.get(str(values.get("method")), {}), **values} if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _settings_agree(self) -> Recipe:
        problems = list(compatibility.problems(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


R = TypeVar("R", bound=Recipe)

#: Names of the same setting in other tools -> ours.
ALIASES = {
    "base_model": "model_name_or_path", "model": "model_name_or_path", "model_id": "model_name_or_path",
    "revision": "model_revision", "torch_dtype": "dtype", "attn_impl": "attn_implementation",
    "cutoff_len": "max_length", "sequence_len": "max_length", "max_seq_length": "max_length", "max_seq_len": "max_length",
    "block_size": "max_length", "excess_length_strategy": "excess_length", "truncation_strategy": "excess_length",
    "sample_packing": "packing",
    "adapter": "adapter_name_or_path",
    "lora_rank": "lora_r", "lora_target_modules": "target_modules", "lora_target": "target_modules",
    "peft_use_dora": "use_dora", "peft_use_rslora": "use_rslora",
    "micro_batch_size": "per_device_train_batch_size", "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size", "global_batch_size": "effective_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps", "num_epochs": "num_train_epochs", "epochs": "num_train_epochs",
    "lr": "learning_rate", "lr_scheduler": "lr_scheduler_type", "optimizer": "optim",
    "gradient_checkpointing": "activation_checkpointing", "out_dir": "output_dir",
    "patience": "early_stopping_patience", "early_stopping_steps": "early_stopping_patience",
}  # fmt: skip

#: Switches of other tools that choose the dtype when they are true.
SWITCHES = {"bf16": "bfloat16", "fp16": "float16"}


def resolved(recipe: R, **choices: Any) -> R:
    """Fill in `choices` in a copy. Raises ValueError when settings conflict."""
    return type(recipe).model_validate({**recipe.model_dump(exclude_unset=True), **choices})


def unresolved(recipe: Recipe) -> list[str]:
    """Return the settings that are still `auto`."""
    return [name for name in Recipe.model_fields if getattr(recipe, name) == AUTO]


def settings_that_decide(effects: Decides) -> tuple[str, ...]:
    """Return the settings, or sections with a setting, that have any of these effects."""
    return tuple(name for name in Recipe.model_fields if decided_by(name) & effects)


def decided_by(name: str, model: type[BaseModel] = Recipe) -> Decides:
    """Return the effects of a setting, or the union over a section."""
    field = model.model_fields[name]
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        effects = [decided_by(setting, field.annotation) for setting in field.annotation.model_fields]
    else:
        extra: Any = field.json_schema_extra
        effects = [Decides[effect.upper()] for effect in extra["decides"]]
    return functools.reduce(operator.or_, effects, NOTHING)
