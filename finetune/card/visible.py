"""Visible GPUs, by CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
from collections.abc import Sequence

from finetune.card import nvidia
from finetune.card.nvidia import Device, DriverError

_UNTOUCHED = "untouched"
#: CUDA_VISIBLE_DEVICES before `hide_gpus` replaced it; None: not set.
_before_hiding: str | None = _UNTOUCHED


def hide_gpus() -> None:
    """Hide all GPUs from CUDA in this process, before torch or bitsandbytes query CUDA."""
    global _before_hiding
    if _before_hiding == _UNTOUCHED:
        # A dry run's optimizer asks whether a CUDA graph is captured, which opens a context: 0.3 to 0.5 GiB that the planned
        # run then lacks. With a GPU, autograd also starts threads, after which a fork can't run a backward pass. NVML still
        # sees all GPUs.
        _before_hiding = os.environ.get(nvidia.VISIBLE_VARIABLE)
        os.environ[nvidia.VISIBLE_VARIABLE] = nvidia.SEES_NONE


def visible_devices() -> str | None:
    """Return the user's CUDA_VISIBLE_DEVICES, None if not set."""
    return os.environ.get(nvidia.VISIBLE_VARIABLE) if _before_hiding == _UNTOUCHED else _before_hiding


def environment_with_gpus() -> dict[str, str]:
    """Return the environment for a child that uses the GPUs."""
    others = {name: value for name, value in os.environ.items() if name != nvidia.VISIBLE_VARIABLE}
    setting = visible_devices()
    return others if setting is None else {**others, nvidia.VISIBLE_VARIABLE: setting}


def visible(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return the devices in CUDA_VISIBLE_DEVICES, in its order."""
    setting = visible_devices()
    if setting is None:
        return tuple(devices)
    selected: list[Device] = []
    for entry in map(str.strip, setting.lower().split(",")):
        matches = [device for device in devices if entry and (entry == device.index or device.uuid.lower().startswith(entry))]
        # as in CUDA, an unknown entry hides all entries after itself, and a repeated entry hides every device
        if len(matches) != 1:
            break
        if matches[0] in selected:
            return ()
        selected += matches
    return tuple(selected)


def usable_devices() -> tuple[Device, ...]:
    """Return the GPUs that this process may use."""
    try:
        return visible(nvidia.read_devices()[0])
    except DriverError:
        return ()
