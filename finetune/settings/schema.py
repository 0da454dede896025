"""The recipe's schema: type, default, unit, help, group and effects of each setting."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from dataclasses import replace
from enum import Flag, auto
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WrapValidator, model_validator
from pydantic.fields import FieldInfo

from finetune.settings import compatibility
from finetune.settings.base_formats import AUTO, BITS_16, BITS_32, QUANTISED, BaseFormat
from finetune.settings.methods import METHODS, USUAL_VALUES, Method
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
        if repeated := sorted(name for name, count in Counter(map(str, names)).items() if count > 1):
            raise ValueError(f"has {', '.join(repeated[:5])} more than once")
        if not all(isinstance(name, str) for name in names):
            raise ValueError("give a list of tokens, or a mapping of tokens to the text that they stand for")
        names = dict.fromkeys(names, "")
    if not isinstance(names, dict):
        return names  # pydantic refuses it
    for name in names:
        is_text = isinstance(name, str) and name == name.strip() and name.isprintable()
        if not is_text or not 0 < len(name) <= _TOKEN_CHARACTERS:
            raise ValueError(
                f"{str(name)[:60]!r} is no token: give printable text of at most {_TOKEN_CHARACTERS} characters, "
                "without white space at its ends"
            )
    return {name: text or "" for name, text in names.items()}


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
Count = Annotated[int, Field(ge=0)]
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
        ..., TOKENS | BYTES | RESULT, "Local file(s), a folder, a pattern (*.jsonl), or a hub dataset id.", min_length=1
    )
    eval_path: str | list[str] | None = _data(None, TOKENS, "Local file(s) with held-out rows.")
    name: str | None = _data(None, TOKENS | RESULT, "Configuration of a hub dataset.")
    split: str = _data("train", TOKENS | RESULT, "Split to train on, from a hub dataset, a saved folder or a column 'split'.")
    eval_split: str | None = _data(None, TOKENS, "Split to hold out, from the same dataset, folder or column 'split'.")
    revision: str | None = _data(None, TOKENS | RESULT, "Commit or tag of a hub dataset.")
    format: AutoOr[RowFormat] = _data(AUTO, TOKENS | RESULT, "Row format; auto detects it from the columns.")
    columns: dict[str, str] = _data(
        {}, TOKENS | RESULT, "Your column names for the format's fields, e.g. {instruction: question, output: answer}."
    )
    ignore_columns: list[str] = _data(
        [], TOKENS | RESULT, "Columns and message fields to ignore, e.g. [label, reasoning_content]."
    )
    json_columns: list[str] = _data(
        [], TOKENS | RESULT, "Columns and message fields whose objects and numbers become JSON text, e.g. [output]."
    )
    image_folder: str | None = _data(
        None, TOKENS | RESULT, "Folder that image paths start from; no image outside it and the data file's folder is read."
    )
    on_bad_rows: Literal["fail", "skip"] = _data(
        "fail", TOKENS | RESULT, "Rows that can't be trained on: refuse to start (fail), or leave them out (skip)."
    )
    accept_findings: list[Literal["leak", "truncated", "replaced", "one label", "contradictions"]] = _data(
        [], NOTHING, "Data doctor findings to accept: they don't stop the run."
    )
    test_split_size: float | int | None = _data(
        None, TOKENS | RESULT, "Rows to hold out: a share below 1 or a count; 0: none; null: 0.1 of 50 rows or more.", ge=0
    )
    max_rows: Positive | None = _data(None, TOKENS | RESULT, "Use only this many rows, from the start.")


class LaunchRecipe(_Strict):
    """How many processes on how many machines; one process on one GPU by default."""

    num_processes: Positive = _launch(1, COST | EXACTNESS, "Training processes on all machines, one per GPU (world size).")
    num_machines: Positive = _launch(1, SPEED, "Number of machines.")
    machine_rank: int = _launch(0, NOTHING, "Rank of this machine, from 0.", ge=0)
    main_process_ip: str = _launch("127.0.0.1", NOTHING, "Address of machine 0.")
    main_process_port: int = _launch(29500, NOTHING, "Port on machine 0.", ge=1, le=65535)
    strategy: Literal["ddp", "fsdp", "deepspeed"] = _launch(
        "ddp", COST | EXACTNESS, "ddp copies the model to every GPU; fsdp and deepspeed shard it."
    )
    zero_stage: Literal[2, 3] = _launch(2, COST | EXACTNESS, "DeepSpeed ZeRO stage.")
    offload: Literal["none", "cpu", "nvme"] = _launch("none", COST | EXACTNESS, "Where FSDP or DeepSpeed offload their shards.")
    nvme_path: str | None = _launch(None, NOTHING, "Directory for NVMe offload.")

    @property
    def processes_here(self) -> int:
        return max(1, self.num_processes // self.num_machines)

    @property
    def is_sharded(self) -> bool:
        """Whether optimizer states and gradients are sharded."""
        return self.strategy != "ddp"

    @property
    def is_zero3(self) -> bool:
        """Whether DeepSpeed ZeRO-3 shards the weights."""
        return self.strategy == "deepspeed" and self.zero_stage == 3

    @property
    def shards_weights(self) -> bool:
        return self.strategy == "fsdp" or self.is_zero3


class Recipe(_Strict):
    """The user's choices. `auto` leaves a setting to the planner, which gives a reason for its choice."""

    # Settings of training reach the trainer in run/training.py, an optimizer's also in model/techniques.py.
    # -- model
    model_name_or_path: str = _model(
        ..., TOKENS | PARAMETERS | COST | RESULT, "Model folder, hub id, or `tiny` for the bundled base model.", min_length=1
    )
    model_revision: str | None = _model(None, TOKENS | PARAMETERS | COST | RESULT, "Commit or tag of a hub model.")
    trust_remote_code: bool = _model(
        False, PARAMETERS | COST | RESULT, "Run the model's own code; needs model_revision as a full commit."
    )
    dtype: AutoOr[Dtype] = _model(AUTO, PARAMETERS | COST | RESULT, "Dtype of computation and of unquantised weights.")
    attn_implementation: AutoOr[Literal["sdpa", "eager", "flash_attention_2", "torch_varlen"]] = _model(
        AUTO, COST | EXACTNESS, "Attention kernels."
    )
    vision: AutoOr[bool] = _model(AUTO, PARAMETERS | COST | RESULT, "Load the vision tower; auto: if rows have images.")
    # -- data
    dataset: DatasetRecipe = Field(description="Training and held-out rows.")
    max_length: AutoOr[Annotated[int, Field(ge=8, le=2**24)]] = _data(AUTO, TOKENS | COST | RESULT, "Longest row, in tokens.")
    excess_length: Literal["drop", "truncate", "chunk", "raise"] = _data(
        "raise", TOKENS | RESULT, "Rows longer than max_length: drop, truncate, chunk (pretrain's default), or raise an error."
    )
    max_pixels: AutoOr[Annotated[int, Field(ge=1024, le=2**26)] | None] = _data(
        AUTO, TOKENS | COST | RESULT, "Scale larger images down to this many pixels; auto: if they don't fit."
    )
    train_on_inputs: bool = _data(False, TOKENS | RESULT, "Train on prompts, too, not only on answers.")
    chat_template: str | None = _data(None, TOKENS | RESULT, "Replaces the model's chat template: a Jinja file, or plain.")
    packing: AutoOr[bool] = _data(AUTO, COST | RESULT, "Pack several rows into one sequence of max_length.")
    # -- adapter
    adapter_name_or_path: Text | None = _adapter(
        None, RESULT, "Continue training this adapter (a run or a folder), with its rank, scale and layers.", min_length=1
    )
    load_in_4bit: AutoOr[bool] = _adapter(AUTO, PARAMETERS | COST | RESULT, "QLoRA: base weights in double-quantised NF4.")
    load_in_8bit: AutoOr[bool] = _adapter(AUTO, PARAMETERS | COST | RESULT, "Base weights in int8.")
    lora_r: AutoOr[Annotated[int, Field(ge=1, le=8192)]] = _adapter(AUTO, PARAMETERS | COST | RESULT, "Rank of the adapters.")
    lora_alpha: AutoOr[Annotated[float, Field(gt=0)]] = _adapter(AUTO, RESULT, "LoRA alpha; adapters are scaled by alpha / r.")
    lora_dropout: float = _adapter(0.0, COST | RESULT, "Dropout before the adapters; costs memory.", ge=0, lt=1)
    target_modules: AutoOr[Layers] = _adapter(AUTO, PARAMETERS | COST | RESULT, "Layers with an adapter: all-linear, or names.")
    new_tokens: NewTokens = _adapter(
        {}, TOKENS | RESULT, "Tokens to add, whose embedding rows are trained: a list, or a mapping of tokens to meanings."
    )
    trained_embedding_rows: list[Row] = _adapter(
        [], PARAMETERS | COST | RESULT, "Trained rows of the embedding: first and end. The plan sets them.", max_length=2
    )
    train_vision: Literal["none", "projector", "all"] = _adapter(
        "none", PARAMETERS | COST | RESULT, "Adapters on the vision tower, too: none, on its projector, or on all of it."
    )
    use_dora: bool = _adapter(False, PARAMETERS | COST | RESULT, "DoRA: weight-decomposed LoRA.")
    use_rslora: bool = _adapter(False, RESULT, "rsLoRA: scale alpha / sqrt(r).")
    adapter_dtype: Literal["float32", "bfloat16"] = _adapter(
        "float32", COST | RESULT, "Dtype of adapters and optimizer states; bfloat16 halves them but loses small updates."
    )
    # -- training
    method: AutoOr[_MethodName] = _training(
        "sft",
        TOKENS | COST | RESULT,
        "sft trains on answers; pretrain on all of a plain text (column text); dpo on pairs of answers (columns chosen, "
        "rejected); kto on answers marked good or bad (column label); auto: by the columns.",
    )
    beta: float | None = _training(
        None, RESULT, "dpo, kto: how close the model stays to the reference; higher is closer. Default: 0.1.", gt=0, le=100
    )
    loss_type: PreferenceLoss | None = _training(
        None, COST | RESULT, "dpo: the loss of a pair, by default sigmoid. kto: kto, or apo_zero_unpaired without a KL term."
    )
    label_smoothing: float | None = _training(None, RESULT, "dpo, loss_type robust: share of misordered pairs.", gt=0, lt=0.5)
    sft_weight: float | None = _training(
        None, RESULT, "dpo: weight of the SFT loss on chosen answers (mean over tokens), which keeps them likely.", ge=0, le=100
    )
    desirable_weight: float | None = _training(None, RESULT, "kto: loss weight of good answers. Default: 1.", gt=0, le=100)
    undesirable_weight: float | None = _training(None, RESULT, "kto: loss weight of bad answers. Default: 1.", gt=0, le=100)
    effective_batch_size: AutoOr[Rows] = _training(AUTO, SPEED | RESULT, "Rows per optimizer step on all GPUs.")
    per_device_train_batch_size: AutoOr[Rows] = _training(AUTO, COST | EXACTNESS, "Micro-batch: rows per GPU and forward pass.")
    gradient_accumulation_steps: AutoOr[Rows] = _training(AUTO, COST | EXACTNESS, "Micro-batches per optimizer step.")
    num_train_epochs: float = _training(2.0, RESULT, "Passes over the data.", gt=0, le=1e6)
    max_steps: Positive | None = _training(None, RESULT, "Optimizer steps; overrides num_train_epochs.")
    learning_rate: AutoOr[Annotated[float, Field(gt=0, lt=1)]] = _training(AUTO, RESULT, "Peak learning rate.")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = _training(
        "cosine", RESULT, "Learning rate schedule."
    )
    warmup_ratio: Fraction = _training(0.03, RESULT, "Share of the steps spent on warmup.")
    warmup_steps: Count | None = _training(None, RESULT, "Warmup steps; overrides warmup_ratio.")
    weight_decay: float = _training(0.0, RESULT, "Weight decay of the adapters.", ge=0)
    max_grad_norm: float = _training(1.0, RESULT, "Clip gradients to this norm.", gt=0)
    seed: int = _training(42, TOKENS | RESULT, "Seed of everything random.", ge=0, lt=2**32)
    # -- memory
    optim: AutoOr[Optimizer] = _memory(AUTO, COST | RESULT, "Optimizer.")
    activation_checkpointing: AutoOr[Checkpointing] = _memory(
        AUTO, COST | EXACTNESS, "Gradient checkpointing; selective keeps attention outputs, offload keeps inputs on the CPU."
    )
    activation_checkpointing_every_n_layers: AutoOr[Positive] = _memory(
        AUTO, COST | EXACTNESS, "Gradient checkpointing only in every n-th layer."
    )
    lean_layers: AutoOr[bool] = _memory(AUTO, COST | EXACTNESS, "Save only about half the activations, in known layers.")
    mlp_tile_tokens: AutoOr[Count] = _memory(AUTO, COST | EXACTNESS, "Tokens per tile of a lean MLP, for long rows; 0: off.")
    offload_embeddings: AutoOr[bool] = _memory(AUTO, COST, "Keep the input embedding in host memory, unless it is tied.")
    layer_offloading: AutoOr[Literal[False, "cpu", "nvme"]] = _memory(
        AUTO, COST, "Where frozen decoder layers are: on the GPU (false), in host memory (cpu), or in a file (nvme)."
    )
    offloaded_layers: AutoOr[Count] = _memory(AUTO, COST, "Decoder layers that layer_offloading moves; 0 without it.")
    torch_compile: AutoOr[bool] = _memory(
        AUTO, COST | EXACTNESS, "Compile the decoder layers; auto: if they fit and save more time than compiling takes."
    )
    gpu: Text = _memory(
        AUTO, COST | EXACTNESS, "auto (this machine's), cpu, nvidia-smi index or UUID, or a name like rtx-4090.", min_length=1
    )
    memory_budget: AutoOr[Size] = _memory(AUTO, NOTHING, "Most GPU memory to use, e.g. 20GiB; auto: all free memory.")
    host_memory: Size | None = _memory(
        None, NOTHING, "Most host memory for offloading, e.g. 32GiB; default: all free memory, no limit for a GPU elsewhere."
    )
    # -- run
    output_dir: AutoOr[Text] = _run(AUTO, NOTHING, "Run directory; auto: runs/<model>-<digest of the recipe>.", min_length=1)
    eval_steps: AutoOr[Count] = _run(
        AUTO, BYTES | EXACTNESS, "Steps between evaluations; 0: never. The step with the lowest held-out loss is the result."
    )
    early_stopping_patience: Positive | None = _run(None, EXACTNESS, "Stop after this many evaluations without a lower loss.")
    sample_answers: AutoOr[Annotated[int, Field(ge=0, le=16)]] = _run(
        AUTO, NOTHING, "Prompts answered at evaluations, first also by the base model; auto: 3, or 0 with layer_offloading."
    )
    save_steps: AutoOr[Count] = _run(AUTO, NOTHING, "Steps between checkpoints; 0: only at the end.")
    save_total_limit: Positive = _run(2, NOTHING, "Newest checkpoints to keep, besides the best.")
    per_device_eval_batch_size: AutoOr[Positive] = _run(AUTO, BYTES | EXACTNESS, "Micro-batch of evaluation.")
    dataloader_num_workers: int = _run(0, SPEED, "Processes that load batches.", ge=0, le=64)
    report_to: Trackers = _run([], NOTHING, "Experiment trackers to log to.")
    price_per_hour: float | None = _run(
        None, NOTHING, "Price of an hour on this machine, from which plan, run and report derive the run's cost.", ge=0
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

    @property
    def requested_formats(self) -> list[BaseFormat]:
        """The quantised formats that the recipe sets; more than one is an error."""
        return [base_format for base_format in QUANTISED if getattr(self, base_format.setting) is True]

    @property
    def base_format(self) -> BaseFormat:
        """The format of resolved settings, or the recipe's set format, else the dtype's."""
        return next(iter(self.requested_formats), BITS_32 if self.dtype == "float32" else BITS_16)

    @property
    def has_kl(self) -> bool:
        """Whether the loss has a KL term, from a second batch of mismatched answers."""
        return self.method == "kto" and self.loss_type != "apo_zero_unpaired"

    @property
    def training_method(self) -> Method:
        """The method, `sft` until the rows decide, adjusted to its loss."""
        method = METHODS.get(self.method, METHODS["sft"])
        # only the KL term needs an answer to another prompt: a second row, and a second pass of the reference
        return method if method.min_rows == 1 or self.has_kl else replace(method, reference_passes=1, min_rows=1)

    @property
    def length_limit(self) -> int | None:
        """`max_length`; None until the plan chooses."""
        return None if self.max_length == AUTO else self.max_length

    @property
    def pixel_limit(self) -> int | None:
        """`max_pixels`; None without a limit, or until the plan chooses."""
        return None if self.max_pixels == AUTO else self.max_pixels


#: Setting -> its names in other tools; and the reverse.
_OTHER_NAMES = {
    "model_name_or_path": "base_model model model_id", "model_revision": "revision", "dtype": "torch_dtype",
    "attn_implementation": "attn_impl", "max_length": "cutoff_len sequence_len max_seq_length max_seq_len block_size",
    "excess_length": "excess_length_strategy truncation_strategy", "packing": "sample_packing",
    "adapter_name_or_path": "adapter", "lora_r": "lora_rank", "target_modules": "lora_target_modules lora_target",
    "use_dora": "peft_use_dora", "use_rslora": "peft_use_rslora",
    "per_device_train_batch_size": "micro_batch_size batch_size train_batch_size", "effective_batch_size": "global_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation", "num_train_epochs": "num_epochs epochs", "learning_rate": "lr",
    "lr_scheduler_type": "lr_scheduler", "optim": "optimizer", "activation_checkpointing": "gradient_checkpointing",
    "output_dir": "out_dir", "early_stopping_patience": "patience early_stopping_steps",
}  # fmt: skip
ALIASES = {alias: name for name, aliases in _OTHER_NAMES.items() for alias in aliases.split()}

#: Switches of other tools that choose the dtype when they are true.
SWITCHES = {"bf16": "bfloat16", "fp16": "float16"}


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
