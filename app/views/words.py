"""Settings, times and speeds in words."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.settings import Settings
from finetune.settings.base_formats import SWITCHES
from finetune.settings.optimizers import EIGHT_BIT, FUSED

from ..language import mark, tr, tr_n

_OPTIMIZERS = mark({FUSED: "AdamW, fused", EIGHT_BIT: "8-bit AdamW"})
_MONTHS = mark("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec")
#: Displayed names of settings; the others are displayed as `Warmup ratio` for `warmup_ratio`.
SETTING_NAMES = {"gpu": "GPU", "use_dora": "DoRA", "use_rslora": "rsLoRA", "beta": "beta"} | mark({
    "lora_r": "LoRA rank", "lora_alpha": "LoRA alpha", "max_length": "Longest row", "effective_batch_size": "Rows per step",
    "per_device_train_batch_size": "Rows at a time", "optim": "Optimizer", "model_name_or_path": "Model",
    "load_in_4bit": "4-bit weights", "load_in_8bit": "8-bit weights", "num_train_epochs": "Epochs", "dataset": "Data",
    "lora_dropout": "LoRA dropout", "lr_scheduler_type": "Learning rate schedule", "dtype": "Data type",
    "excess_length": "Longer rows", "attn_implementation": "Attention", "adapter_name_or_path": "Adapter",
})  # fmt: skip
_NUMERIC_PHRASES = mark({
    "max_length": "Shorten the longest row to {n} tokens", "lora_r": "LoRA rank {n}",
    "effective_batch_size": "{n} rows per step",
})  # fmt: skip
_VALUE_PHRASES = mark({
    ("load_in_4bit", "true"): "Use 4-bit weights", ("load_in_8bit", "true"): "Use 8-bit weights",
    ("optim", EIGHT_BIT): "Use the 8-bit optimizer", ("optim", FUSED): "Use the fused optimizer",
    ("adapter_dtype", "bfloat16"): "16-bit adapters", ("layer_offloading", "cpu"): "Offload layers to CPU",
    ("layer_offloading", "nvme"): "Offload layers to disk",
    ("offload_embeddings", "true"): "Offload the input embedding to CPU",
    ("lora_dropout", "0.0"): "No dropout", ("use_dora", "false"): "Plain LoRA instead of DoRA",
    ("excess_length", "drop"): "drop longer rows", ("gpu", "auto"): "Use this machine's GPU",
    ("dataset.on_bad_rows", "skip"): "Leave the rows out",
})  # fmt: skip
#: Name and look of each state of a run.
STATES = {
    "queued": (mark("In the queue"), "plain"), "starting": (mark("Starting"), "plain"), "running": (mark("Running"), "ok"),
    "pausing": (mark("Pausing"), "warn"), "paused": (mark("Paused"), "warn"),
    "finished": (mark("Finished"), "ok"), "diverged": (mark("Diverged"), "bad"), "failed": (mark("Failed"), "bad"),
    "lost": (mark("Process lost"), "bad"),
}  # fmt: skip
QUEUE_STATE_NAMES = mark({"waiting": "In the queue", "preparing": "Starting", "failed": "Failed"})
_EVERY_N = "activation_checkpointing_every_n_layers"
#: Phrases for gradient checkpointing in other ways than every nth layer.
_CHECKPOINTING_KINDS = mark({
    "false": "no gradient checkpointing", "selective": "gradient checkpointing except attention",
    "offload": "gradient checkpointing, inputs offloaded to CPU",
})  # fmt: skip
_IMPLIED = {"gradient_accumulation_steps", "offloaded_layers", _EVERY_N}  # without a phrase: they follow from others


def state_name(state: str) -> str:
    """Return the displayed name of a run's state."""
    return tr(STATES.get(state, (state.capitalize(), ""))[0])


def setting_name(name: str) -> str:
    """Return a setting's displayed name."""
    return tr(SETTING_NAMES.get(name, name.replace("_", " ").capitalize()))


def in_words(override: str) -> str:
    """Return the effect of `key=value key=value` as a phrase for a button."""
    settings = dict(item.partition("=")[::2] for item in shlex.split(override))
    phrases = [phrase for name, value in settings.items() if (phrase := _phrase(name, value, settings))]
    return tr("; ").join(phrases) or tr("Change the recipe")


def _phrase(name: str, value: str, settings: Mapping[str, str]) -> str:
    if name == "per_device_train_batch_size":
        return tr_n("{n} row at a time", "{n} rows at a time", int(value))
    if name == "activation_checkpointing" or (name == _EVERY_N and "activation_checkpointing" not in settings):
        return capitalized(_checkpointing(settings.get("activation_checkpointing", "true"), int(settings.get(_EVERY_N, 1))))
    # one switch off and another on is one change of the weights' format
    if name in SWITCHES and value == "false":
        return "" if "true" in map(settings.get, SWITCHES) else tr("Use 16-bit weights")
    if name in _NUMERIC_PHRASES:
        return tr(_NUMERIC_PHRASES[name], n=f"{int(value):,}")
    if name in _IMPLIED:
        return ""
    if name == "dataset.ignore_columns":
        return tr("Leave out {columns}", columns=value.strip("[]"))
    switch = _VALUE_PHRASES.get((name, value))
    return tr(switch) if switch else tr("{setting}: {value}", setting=name.replace("_", " "), value=value)


def _checkpointing(kind: str, count: int) -> str:
    if kind in _CHECKPOINTING_KINDS:
        return tr(_CHECKPOINTING_KINDS[kind])
    return tr("gradient checkpointing in every layer" if count == 1 else "gradient checkpointing in 1 layer of {n}", n=count)


def plan_in_words(settings: Settings) -> str:
    """Return `16-bit weights, no gradient checkpointing`."""
    phrases = [tr("{precision} weights", precision=precision(settings)), gradient_checkpointing(settings)]
    if settings.optim == EIGHT_BIT:
        phrases.append(tr("8-bit optimizer"))
    if settings.layer_offloading:
        is_disk = settings.layer_offloading == "nvme"
        template = mark("{n} layers offloaded to disk") if is_disk else mark("{n} layers offloaded to CPU")
        phrases.append(tr(template, n=settings.offloaded_layers))
    return tr(", ").join(phrases)


def capitalized(text: str) -> str:
    """Capitalise the first letter only."""
    return text[:1].upper() + text[1:]


def precision(settings: Settings) -> str:
    """Return the base model's bits, as `4-bit`."""
    return tr("{bits}-bit", bits=settings.base_format.bits)


def gradient_checkpointing(settings: Settings) -> str:
    """Return `gradient checkpointing in 1 layer of 2`."""
    kind = str(settings.activation_checkpointing).lower()
    return _checkpointing(kind, settings.activation_checkpointing_every_n_layers)


def optimizer(settings: Settings) -> str:
    """Return the optimizer's displayed name."""
    name = _OPTIMIZERS.get(settings.optim)
    return tr(name) if name else settings.optim.replace("_", " ")


def loss_text(value: float) -> str:
    """Return three decimals, or four below 0.1."""
    return f"{value:.{4 if abs(value) < 0.1 else 3}f}"


def duration(seconds: float) -> str:
    """Return `41 min`, `18 h 15 min` or `50 s`."""
    if seconds < 60:
        return tr("{s} s", s=f"{seconds:.0f}")
    hours, minutes = divmod(round(seconds / 60), 60)
    return tr("{h} h {m} min", h=hours, m=f"{minutes:02d}") if hours else tr("{m} min", m=minutes)


def day(moment: time.struct_time) -> str:
    """Return `24 Nov`."""
    return tr("{day} {month}", day=moment.tm_mday, month=tr(_MONTHS).split()[moment.tm_mon - 1])


def clock(time_s: float) -> str:
    """Return `14:58`, or `24 Nov 14:58` on another day."""
    moment = time.localtime(time_s)
    hour = time.strftime("%H:%M", moment)
    return hour if moment[:3] == time.localtime()[:3] else f"{day(moment)} {hour}"


def speed_change(tokens_per_s: float | None, chosen_tokens_per_s: float | None) -> str:
    """Return speed relative to the chosen plan, as `12 % slower`."""
    if not chosen_tokens_per_s or not tokens_per_s:
        return ""
    percent = round(100 * (tokens_per_s / chosen_tokens_per_s - 1))
    template = mark("{n} % slower") if percent < 0 else mark("{n} % faster")
    return tr(template, n=abs(percent)) if percent else tr("same speed")


def value_text(value: Any) -> str:
    """Return a setting's value as text, for `dataset` its file."""
    if isinstance(value, dict):
        return Path(str(value["path"])).name if "path" in value else ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, bool):
        return tr("yes" if value else "no")
    return tr("not set") if value is None else str(value)


def short_name(gpu_name: str) -> str:
    """Return a GPU's name without `NVIDIA GeForce`."""
    return gpu_name.removeprefix("NVIDIA ").removeprefix("GeForce ")
