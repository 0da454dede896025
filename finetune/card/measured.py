"""Cached measurements of this machine's GPUs: CUDA contexts, and rates (`finetune doctor --measure`)."""

from __future__ import annotations

import importlib.metadata
import statistics
from dataclasses import dataclass, replace

from pydantic import PositiveInt

from finetune.card.card import Card
from finetune.card.nvidia import Device
from finetune.files import cache_dir, read_json_as, read_object, to_json, write_json
from finetune.units import GIB, MIB

CONTEXTS, RATES = "contexts.json", "rates.json"
MOST_MEASUREMENTS = 20  # contexts stored per GPU, newest
#: Far above any published context: a larger measurement includes other programs and is dropped.
MOST_CONTEXT_BYTES = round(1.5 * GIB)
SPREAD = 40 * MIB  # a context grows by this much as kernels are loaded: from 105 to 141 MiB on a T4


def record_measurement(card_name: str, context_bytes: int) -> None:
    """Record the CUDA context of a process. Raises OSError."""
    if not 0 < context_bytes <= MOST_CONTEXT_BYTES:
        return
    contexts, path = _contexts(), cache_dir() / CONTEXTS
    contexts[card_name] = [*contexts.get(card_name, []), context_bytes][-MOST_MEASUREMENTS:]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, contexts, checksum=True)


def measured_context(card_name: str) -> tuple[int, int] | None:
    """Return median and spread of the context in bytes, None if never measured."""
    sizes = _contexts().get(card_name)
    if not sizes:
        return None
    return int(statistics.median_high(sizes)), max(SPREAD, max(sizes) - min(sizes))


def _contexts() -> dict[str, list[int]]:
    # a damaged cache counts as empty, as the next run measures again
    return read_json_as(cache_dir() / CONTEXTS, dict[str, list[PositiveInt]]) or {}


@dataclass(frozen=True)
class Rates:
    """Rates of large operations, in FLOP and bytes per second."""

    flops: float
    bandwidth_bytes_s: float
    launch_s: float  # host seconds per operator
    conditions: str  # by `conditions_of`: the rates do not apply under others
    measured_at: str
    attention_flops: float | None = None  # causal, forward and backward; None on a CPU, like the copy rates
    pinned_bytes_s: float | None = None  # copies between host and GPU, in the slower direction
    pageable_bytes_s: float | None = None


def conditions_of(device: Device | None) -> str:
    """Return the versions and power limit that rates depend on."""
    facts = [f"torch {importlib.metadata.version('torch')}"]
    if device:
        facts += [f"driver {device.driver}", f"power limit {device.power_limit_w:g} W" if device.power_limit_w else ""]
    return ", ".join(filter(None, facts))


def store_rates(card: Card, rates: Rates) -> None:
    """Store the rates of this GPU, or of the CPU. Raises OSError."""
    path = cache_dir() / RATES
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**(read_object(path) or {}), card.uuid or card.name: to_json(rates)}, checksum=True)


def with_measured_rates(card: Card, device: Device | None = None) -> Card:
    """Apply rates measured under the same conditions."""
    rates, conditions = read_json_as(cache_dir() / RATES, Rates, key=card.uuid or card.name), conditions_of(device)
    if rates is None or rates.conditions != conditions:
        why = f"measured with {rates.conditions}; now {conditions}: measure again" if rates else "not measured here"
        return replace(card, reason=f"{card.reason}; rates: {why}")
    return replace(
        card, bf16_flops=rates.flops, flops_share=1.0, attention_flops=rates.attention_flops, bandwidth_share=1.0,
        bandwidth_bytes_s=rates.bandwidth_bytes_s, pcie_bytes_s=rates.pinned_bytes_s or card.pcie_bytes_s,
        launch_s=rates.launch_s, rates_measured_at=rates.measured_at, reason=f"{card.reason}; rates: measured here",
    )  # fmt: skip
