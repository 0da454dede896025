"""Find a GPU of this machine or the catalogue (cards.json), or the CPU."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from pathlib import Path
from typing import Any

from finetune.card.card import Card, host_card
from finetune.card.measured import measured_context, with_measured_rates
from finetune.card.nvidia import Device
from finetune.card.visible import choose_device
from finetune.errors import CardError, CommandError, NoCard
from finetune.units import GIB, format_bytes

#: Assumed CUDA context of a card neither measured nor in the catalogue.
UNLISTED = Card("", 0, 0, context_bytes=round(0.4 * GIB), context_uncertainty_bytes=round(0.25 * GIB))
MEMORY_TOLERANCE = 0.08  # a card whose memory differs from the catalogue's by more than this share is another variant
_DEVICE_ID = re.compile(r"\d{1,2}|gpu-[0-9a-f-]+")  # index in nvidia-smi, or a UUID or its beginning
_SIZE = re.compile(r"(\d+)\s*g(?:i?b)?")
_IGNORED_WORDS = re.compile("nvidia|geforce|tesla|quadro|graphics|corporation|generation")
_SPELLINGS = (("mobile", "laptop"), ("maxq", "laptop"), ("notebook", "laptop"), ("tis", "tisuper"))


def find_card(gpu: str, *, free_bytes: int | None = None, here: bool = False, processes: int = 1) -> Card:
    """Find a card by `auto`, `cpu`, an index or UUID of nvidia-smi, or a catalogue name. Raises RecipeError."""
    wanted = gpu.strip().lower()
    if wanted == "cpu":
        card = with_measured_rates(host_card())
    elif wanted == "auto" or _DEVICE_ID.fullmatch(wanted):
        accepts = None if wanted == "auto" else lambda device: wanted == device.index or device.uuid.lower().startswith(wanted)
        card = _measured_card(*choose_device(gpu, accepts, processes))
    else:
        card = _catalogue_card(gpu)
        # `here`, for training: a named card must be in this machine, and torch must be able to use the card
        if here:
            name, device_name = card.name, _entries()[card.name]["device"]
            card = _measured_card(*choose_device(name, lambda device: _name_of_device(device) == name, processes, device_name))
    if here and card.problem:
        raise CardError(f"gpu: {gpu}, but {card.problem}", card.problem_fix)
    if free_bytes is None:  # it is set to plan for another machine
        return card
    if not 0 < free_bytes <= card.total_bytes:
        raise CommandError(
            f"{format_bytes(free_bytes)} free is not possible: {card.name} has {format_bytes(card.total_bytes)}",
            f"Give a size up to {format_bytes(card.total_bytes)}.",
        )
    return dataclasses.replace(card, free_bytes=free_bytes, reason=f"{card.reason}; {format_bytes(free_bytes)} free as given")


@functools.cache
def _entries() -> dict[str, dict[str, Any]]:
    return json.loads((Path(__file__).parent / "cards.json").read_text(encoding="utf-8"))["cards"]


def catalogue() -> dict[str, Card]:
    """Return name -> Card of the catalogue; `reason` names the sources."""
    return {name: _from_entry(name) for name in _entries()}


def catalogue_sizes() -> dict[str, int]:
    """Return name -> advertised memory in GB."""
    return {name: entry["box_gb"] for name, entry in _entries().items()}


def _from_entry(name: str) -> Card:
    entry = _entries()[name]
    # cards.json has published units: GiB, TFLOP/s and GB/s
    total, used = round(entry["total_gib"] * GIB), round(entry["held_gib"] * GIB)
    measured = measured_context(name) or measured_context(entry["device"])
    context, spread = measured or (round(entry["context_gib"] * GIB), round(entry["context_uncertainty_gib"] * GIB))
    desktop = f", {format_bytes(used)} assumed in use by a desktop" if used else ""
    return Card(
        name=name, total_bytes=total, free_bytes=total - used, capability=tuple(entry["capability"]),
        bf16_flops=entry["bf16_tflops"] * 1e12, bandwidth_bytes_s=entry["bandwidth_gb_s"] * 1e9,
        fp32_flops=entry.get("fp32_tflops", 0) * 1e12 or None,
        pcie_bytes_s=entry["pcie_gb_s"] * 1e9, context_bytes=context, context_uncertainty_bytes=spread, source="catalogue",
        reason=f"catalogue: {format_bytes(total)} as torch sees it{desktop}; {entry['source']}",
        **entry.get("sustained", {}),
    )  # fmt: skip


def listed_card(device: Device) -> Card:
    """Return the device's card in the catalogue, or UNLISTED."""
    name = _name_of_device(device)
    return _from_entry(name) if name else UNLISTED


def _measured_card(device: Device, choice_reason: str, problem: tuple[str, str]) -> Card:
    # the driver reports name, memory, capability and PCIe link; compute and memory rates come from the catalogue until
    # `finetune doctor --measure` has run
    listed = listed_card(device)
    measured = measured_context(device.name)
    context, spread = measured or (listed.context_bytes, listed.context_uncertainty_bytes)
    holders = f" by {', '.join(device.holders[:4])}" if device.holders else ""
    context_source = "measured here" if measured else "from the catalogue" if listed.name else "assumed"
    card = dataclasses.replace(
        listed, name=device.name, total_bytes=device.total_bytes, free_bytes=device.free_bytes, capability=device.capability,
        pcie_bytes_s=device.pcie_bytes_s or listed.pcie_bytes_s, context_bytes=context, context_uncertainty_bytes=spread,
        source="measured",
        reason=f"this machine: {format_bytes(device.free_bytes)} of {format_bytes(device.total_bytes)} free now, "
        f"{format_bytes(device.total_bytes - device.free_bytes)} in use{holders}; CUDA context {context_source}{choice_reason}",
        uuid=device.uuid, problem=problem[0], problem_fix=problem[1],
    )  # fmt: skip
    return with_measured_rates(card, device)


def _name_of_device(device: Device) -> str | None:
    differences = {
        name: abs(entry["total_gib"] * GIB / device.total_bytes - 1)
        for name, entry in _entries().items()
        if _normalised(entry["device"]) == _normalised(device.name)
    }
    closest = min(differences, key=differences.__getitem__, default="")
    return closest if closest and differences[closest] <= MEMORY_TOLERANCE else None


def _catalogue_card(gpu: str) -> Card:
    typed_key, names = _search_key(gpu), {_search_key(name): name for name in _entries()}
    if name := names.get(typed_key) or _catalogue_name(gpu, names):
        return _from_entry(name)
    completions = [key for key in names if typed_key and key.startswith(typed_key)][:4]
    similar = [names[key] for key in completions or difflib.get_close_matches(typed_key, names, n=3, cutoff=0.55)]
    fix = (
        f"Did you mean {' or '.join(similar)}?" if similar else f"Known: {', '.join(sorted(names.values()))}; or auto, or cpu."
    )
    problem = f"gpu: '{gpu}' is not in the GPU catalogue (NVIDIA GPUs with tensor cores)"
    raise NoCard(problem, f"{fix} For several GPUs, also set launch.num_processes.")


def _catalogue_name(typed: str, names: dict[str, str]) -> str | None:
    driver_names = [name for name, entry in _entries().items() if _normalised(entry["device"]) == _normalised(typed)]
    if len(driver_names) == 1:  # several catalogue cards share a driver name
        return driver_names[0]
    if size := _SIZE.search(typed.lower()):  # a size that the catalogue's name leaves out: RTX 4090 24GB
        name = names.get(_search_key(_SIZE.sub("", typed.lower())))
        return name if name and _entries()[name]["box_gb"] == int(size[1]) else None
    return None


def _normalised(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _IGNORED_WORDS.sub("", name.lower()))


def _search_key(name: str) -> str:
    key = re.sub(r"(\d\d)s$", r"\1super", _normalised(name))  # 4070s is 4070 Super
    for ending, standard in _SPELLINGS:
        key = re.sub(rf"{ending}$", standard, key)
    return re.sub(r"^(rtx|gtx)", "", key)
