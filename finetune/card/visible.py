"""Which of the machine's cards a program may use, in CUDA's order: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.

Source of the rules: CUDA programming guide, "CUDA Environment Variables".
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from finetune.card.nvidia import Device


def visible(devices: Iterable[Device]) -> tuple[Device, ...]:
    """The devices that CUDA_VISIBLE_DEVICES leaves, in the order in which it names them.

    An entry that names none hides all after it; one that is named twice hides all of them.
    """
    ordered = in_cuda_order(devices)
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return ordered
    found: list[Device] = []
    for entry in wanted.split(","):
        device = _named(entry.strip(), ordered)
        if device is None:
            break
        if device in found:
            return ()
        found.append(device)
    return tuple(found)


def for_processes(allowed: Iterable[Device]) -> tuple[Device, ...]:
    """Of the visible devices those that several processes can have one of each: whole cards, else one instance.

    CUDA shows a program one instance of all split cards, and NCCL connects none (NVIDIA's MIG user guide, "CUDA Device
    Enumeration").
    """
    devices = tuple(allowed)
    return tuple(device for device in devices if not device.is_instance) or devices[:1]


def in_cuda_order(devices: Iterable[Device]) -> tuple[Device, ...]:
    """CUDA counts the fastest first, unless CUDA_DEVICE_ORDER says PCI_BUS_ID, which is the driver's own order.

    How CUDA compares cards is not published; cores x clock is assumed, and the bus decides between equals.
    """
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return tuple(devices)
    return tuple(sorted(devices, key=lambda device: -device.speed))


def _named(entry: str, ordered: tuple[Device, ...]) -> Device | None:
    """A device by CUDA's number, or by as much of its UUID as makes it the only one."""
    if entry.isdecimal():
        first: dict[str, Device] = {}
        for device in ordered:  # a card that is split counts once, as its first instance
            first.setdefault(device.index.partition(":")[0], device)
        return [*first.values()][int(entry)] if int(entry) < len(first) else None
    same = [device for device in ordered if entry and (device.uuid or "").lower().startswith(entry.lower())]
    return same[0] if len(same) == 1 else None
