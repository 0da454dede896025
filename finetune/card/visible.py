"""Which of the machine's cards a program may use, in CUDA's order: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.

Source of the rules: CUDA programming guide, "CUDA Environment Variables".
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from finetune.card import nvidia
from finetune.card.nvidia import Device, DriverError

_UNTOUCHED = "untouched"
#: CUDA_VISIBLE_DEVICES before `hide_gpus` replaced it; None: not set.
_before_hiding: str | None = _UNTOUCHED


def hide_gpus() -> None:
    """Let CUDA see no GPU in this process, which plans and does not compute; before torch or bitsandbytes first ask it.

    A dry run's optimizer asks whether a CUDA graph is captured, which opens a context: 0.3 to 0.5 GiB that the planned run then
    lacks. With a GPU autograd starts threads, too, after which a fork can't run a backward pass. NVML still sees every GPU.
    """
    global _before_hiding
    if _before_hiding == _UNTOUCHED:
        _before_hiding = os.environ.get(nvidia.VISIBLE_VARIABLE)
        os.environ[nvidia.VISIBLE_VARIABLE] = nvidia.SEES_NONE


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as the user has set it; None when it is not set."""
    return os.environ.get(nvidia.VISIBLE_VARIABLE) if _before_hiding == _UNTOUCHED else _before_hiding


def environment_with_gpus() -> dict[str, str]:
    """This process's environment for a child that computes: `hide_gpus` is undone."""
    others = {name: value for name, value in os.environ.items() if name != nvidia.VISIBLE_VARIABLE}
    shown = visible_devices()
    return others if shown is None else {**others, nvidia.VISIBLE_VARIABLE: shown}


def visible(devices: Iterable[Device]) -> tuple[Device, ...]:
    """The devices that CUDA_VISIBLE_DEVICES leaves, in the order in which it names them.

    An entry that names none hides all after it; one that is named twice hides all of them.
    """
    ordered = in_cuda_order(devices)
    setting = visible_devices()
    if setting is None:
        return ordered
    devices_in_order: list[Device] = []
    for entry in setting.split(","):
        device = _named(entry.strip(), ordered)
        if device is None:
            break
        if device in devices_in_order:
            return ()
        devices_in_order.append(device)
    return tuple(devices_in_order)


def usable_devices() -> tuple[Device, ...]:
    """The devices of this machine that this process may use, as `visible`; none without a driver."""
    try:
        return visible(nvidia.read_devices()[0])
    except DriverError:
        return ()


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
    variable, driver_order = nvidia.DRIVER_ORDER
    if os.environ.get(variable) == driver_order:
        return tuple(devices)
    return tuple(sorted(devices, key=lambda device: -device.speed))


def _named(entry: str, ordered: tuple[Device, ...]) -> Device | None:
    """A device by CUDA's number, or by as much of its UUID as makes it the only one."""
    if entry.isdecimal():
        first: dict[str, Device] = {}
        for device in ordered:  # a card that is split counts once, as its first instance
            first.setdefault(device.index.partition(":")[0], device)
        return [*first.values()][int(entry)] if int(entry) < len(first) else None
    matches = [device for device in ordered if entry and (device.uuid or "").lower().startswith(entry.lower())]
    return matches[0] if len(matches) == 1 else None
