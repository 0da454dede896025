"""Rates measured on this machine (`finetune doctor --measure`), stored in the cache for each GPU and the CPU."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, replace

from finetune.card.card import Card
from finetune.card.nvidia import Device
from finetune.files import cache_dir, read_object, write_json
from finetune.serialise import read_own, to_json

FILE = "rates.json"


@dataclass(frozen=True)
class Rates:
    """What large operations reach, in FLOP and bytes per second, and the host's seconds for one operator (`launch_s`).

    `attention_flops`: causal, forward and backward. Copies between host and GPU: the slower direction. None on a CPU.
    `conditions`: what else rates depend on; under others they are not used.
    """

    flops: float
    bandwidth_bytes_s: float
    launch_s: float
    conditions: str
    measured_at: str
    attention_flops: float | None = None
    pinned_bytes_s: float | None = None
    pageable_bytes_s: float | None = None


def conditions_of(device: Device | None) -> str:
    """Versions and power limit that rates of this GPU, or of the CPU, depend on."""
    facts = [f"torch {importlib.metadata.version('torch')}"]
    if device:
        facts += [f"driver {device.driver}", f"power limit {device.power_limit_w:g} W" if device.power_limit_w else ""]
    return ", ".join(filter(None, facts))


def store_rates(card: Card, rates: Rates) -> None:
    """Replace the stored rates of this GPU, or of the CPU. Raises OSError when the cache can't be written."""
    path = cache_dir() / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**(read_object(path) or {}), card.uuid or card.name: to_json(rates)}, checksum=True)


def with_measured_rates(card: Card, device: Device | None = None) -> Card:
    """The card with the rates measured on it under the same conditions; `reason` says where its rates are from."""
    rates, now = read_own(cache_dir() / FILE, Rates, key=card.uuid or card.name), conditions_of(device)
    if rates is None or rates.conditions != now:
        why = f"measured with {rates.conditions}, now it has {now}: measure again" if rates else "not measured here"
        return replace(card, reason=f"{card.reason}; rates: {why}")
    return replace(
        card, bf16_flops=rates.flops, flops_share=1.0, attention_flops=rates.attention_flops, bandwidth_share=1.0,
        bandwidth_bytes_s=rates.bandwidth_bytes_s, pcie_bytes_s=rates.pinned_bytes_s or card.pcie_bytes_s,
        launch_s=rates.launch_s, rates_measured_at=rates.measured_at, reason=f"{card.reason}; rates: measured here",
    )  # fmt: skip
