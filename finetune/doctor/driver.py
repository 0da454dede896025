"""The NVIDIA driver, and the memory of each card with those who hold it, read through NVML: nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pynvml

from finetune.card.nvidia import driver_versions, read_devices
from finetune.doctor.finding import Finding
from finetune.units import format_bytes

_NO_CARD_FIX = (
    "Without a card: plan for one (finetune plan RECIPE --gpu rtx-4090), or train the bundled model on the processor "
    "(finetune run tiny-cpu)."
)
#: More than this share of a card held by others is worth a warning.
MOST_HELD = 0.15


def check_driver(pci: Path = Path("/sys/bus/pci/devices")) -> Finding:
    """Is the driver there, and which CUDA does it run? `pci` tells whether there is a card that it should drive."""
    try:
        driver, cuda = driver_versions()
    except pynvml.NVMLError as error:
        said = str(error).rstrip(".")
        if not _has_nvidia_card(pci):
            return Finding("driver", "warn", f"no NVIDIA card in this machine ({said})", _NO_CARD_FIX)
        fix = "Install NVIDIA's driver and restart; in a container start it with --gpus all (NVIDIA Container Toolkit)."
        return Finding("driver", "fail", f"there is an NVIDIA card, but its driver does not answer ({said})", fix)
    facts = {"driver": driver, "cuda": f"{cuda[0]}.{cuda[1]}"}
    return Finding("driver", "ok", f"{driver}, runs CUDA up to {facts['cuda']}", facts=facts)


def check_cards() -> Iterator[Finding]:
    """Free memory of each card, and who holds the rest."""
    try:
        devices = read_devices()
    except pynvml.NVMLError:
        yield Finding("card memory", "skip", "no card to look at")
        return
    if not devices:
        yield Finding("card memory", "warn", "the driver sees no card", _NO_CARD_FIX)
    for number, device in enumerate(devices):
        held = device.total_bytes - device.free_bytes
        who = f" by {', '.join(device.holders[:6])}" if device.holders else ""
        what = f"{device.name}: {format_bytes(device.free_bytes)} of {format_bytes(device.total_bytes)} free"
        facts = {
            "index": number, "name": device.name, "total_bytes": device.total_bytes, "free_bytes": device.free_bytes,
            "capability": list(device.capability) if device.capability else None, "holders": list(device.holders),
        }  # fmt: skip
        if held <= MOST_HELD * device.total_bytes:
            yield Finding("card memory", "ok", what, facts=facts)
        else:
            fix = "Close what you don't need on the card; the plan counts on what is free when it is made."
            yield Finding("card memory", "warn", f"{what}; {format_bytes(held)} held{who}", fix, facts)


def _has_nvidia_card(pci: Path) -> bool:
    """NVIDIA's vendor id on a display or 3D controller (class 0x03) of the PCI bus."""
    for device in pci.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return True
    return False
