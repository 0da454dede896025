"""Settings in words: the page says what a change does, not how a command line spells it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from typing import Any

from finetune.memory.forecast import PARTS
from finetune.settings import Settings
from finetune.settings.base_formats import base_format_of
from finetune.settings.optimizers import EIGHT_BIT, FUSED

from ..language import mark, tr

_OPTIMIZERS = {FUSED: "AdamW, fused", EIGHT_BIT: "8-bit AdamW"}
_MONTHS = mark("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec")
#: Settings whose size a sentence can say.
_NUMBERS = {
    "max_length": "Shorten the longest row to {:,} tokens", "lora_r": "LoRA rank {}",
    "effective_batch_size": "{} rows per step",
}  # fmt: skip
#: A setting and its value as text -> what it does.
_SWITCHES = {
    ("load_in_4bit", "true"): "Use 4-bit weights", ("load_in_8bit", "true"): "Use 8-bit weights",
    ("optim", EIGHT_BIT): "Use the 8-bit optimizer", ("optim", FUSED): "Use the fused optimizer",
    ("activation_checkpointing", "true"): "Recompute activations",
    ("activation_checkpointing", "false"): "Recompute nothing",
    ("activation_checkpointing", "selective"): "Recompute all but attention",
    ("activation_checkpointing", "offload"): "Recompute from inputs in host memory",
    ("layer_offloading", "cpu"): "Keep layers in host memory", ("layer_offloading", "nvme"): "Keep layers on the drive",
    ("offload_embeddings", "true"): "Keep the input embedding in host memory",
    ("lora_dropout", "0.0"): "No dropout", ("use_dora", "false"): "Plain LoRA instead of DoRA",
    ("excess_length", "drop"): "leave longer rows out", ("gpu", "auto"): "Use this machine's GPU",
    ("dataset.on_bad_rows", "skip"): "Leave the rows out",
}  # fmt: skip
#: Settings that follow from others, or say that something is off.
_IMPLIED = {"gradient_accumulation_steps", "offloaded_layers"}


def in_words(override: str) -> str:
    """What `key=value key=value` does, as a phrase for a button."""
    settings = dict(item.partition("=")[::2] for item in shlex.split(override))
    phrases = [phrase for name, value in settings.items() if (phrase := _phrase(name, value, settings))]
    return "; ".join(phrases) or "Change the recipe"


def _phrase(name: str, value: str, settings: Mapping[str, str]) -> str:
    if name == "per_device_train_batch_size":
        return f"{_rows(int(value))} at a time"
    if name == "activation_checkpointing_every_n_layers":
        return "" if "activation_checkpointing" in settings else f"Recompute {every_n(int(value))}"
    if (name, value) == ("activation_checkpointing", "true") and "activation_checkpointing_every_n_layers" in settings:
        return f"Recompute {every_n(int(settings['activation_checkpointing_every_n_layers']))}"
    if name in ("load_in_4bit", "load_in_8bit") and value == "false":
        return "" if "true" in (settings.get("load_in_4bit"), settings.get("load_in_8bit")) else "Use 16-bit weights"
    if name in _NUMBERS:
        return _NUMBERS[name].format(int(value))
    if name in _IMPLIED:
        return ""
    return _SWITCHES.get((name, value), f"{name.replace('_', ' ')}: {value}")


def every_n(count: int) -> str:
    """How many layers are recomputed."""
    return "every layer" if count == 1 else f"1 layer in {count}"


def plan_in_words(settings: Settings) -> str:
    """`16-bit weights, nothing recomputed`: how these settings fit a model into a GPU."""
    optim = ", 8-bit optimizer" if settings.optim == EIGHT_BIT else ""
    layers = f", {settings.offloaded_layers} layers in host memory" if settings.layer_offloading else ""
    return f"{precision(settings)} weights, {recomputation(settings)}{optim}{layers}"


def precision(settings: Settings) -> str:
    """Bits of the base model's weights."""
    bits = base_format_of(settings).bits
    return f"{bits}-bit"


def recomputation(settings: Settings) -> str:
    """Which layers run their forward pass twice."""
    kind, count = settings.activation_checkpointing, settings.activation_checkpointing_every_n_layers
    if kind is False:
        return "nothing recomputed"
    if kind == "selective":
        return "all but attention recomputed"
    if kind == "offload":
        return "recomputed, inputs in host memory"
    return f"{every_n(count)} recomputed"


def optimizer(settings: Settings) -> str:
    """The optimizer's name."""
    return _OPTIMIZERS.get(settings.optim, settings.optim.replace("_", " "))


def micro_batch(settings: Settings) -> str:
    """`1 row × 16`: rows at a time, and how many times in a step."""
    return f"{_rows(settings.per_device_train_batch_size)} × {settings.gradient_accumulation_steps}"


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def loss_text(value: float) -> str:
    """A loss with three decimals; with four below 0.1."""
    return f"{value:.{4 if abs(value) < 0.1 else 3}f}"


def minutes(seconds: float) -> str:
    """`41 min`, `18 h 15 min`, `50 s`."""
    if seconds < 60:
        return tr("{s} s", s=f"{seconds:.0f}")
    whole = round(seconds / 60)
    return tr("{m} min", m=whole) if whole < 60 else tr("{h} h {m} min", h=whole // 60, m=f"{whole % 60:02d}")


def day(moment: time.struct_time) -> str:
    """`24 Nov`."""
    return tr("{day} {month}", day=moment.tm_mday, month=tr(_MONTHS).split()[moment.tm_mon - 1])


def largest(parts: Mapping[str, int]) -> str:
    """The part that takes most."""
    return max(PARTS, key=lambda part: parts.get(part, 0))


def override_values(override: str) -> dict[str, Any]:
    """The names that an override sets, with their values as text."""
    return dict(item.partition("=")[::2] for item in shlex.split(override))
