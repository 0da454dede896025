"""Which of the machine's GPUs a program may use: CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
from collections.abc import Sequence

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


def visible(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return the devices in CUDA_VISIBLE_DEVICES, in its order; numbers are nvidia-smi's indexes.

    As in CUDA, an unknown entry hides all entries after it, and a repeated entry hides every device.
    """
    setting = visible_devices()
    if setting is None:
        return tuple(devices)
    shown: list[Device] = []
    for entry in map(str.strip, setting.lower().split(",")):
        named = [device for device in devices if entry and (entry == device.index or device.uuid.lower().startswith(entry))]
        if len(named) != 1:
            break
        if named[0] in shown:
            return ()
        shown += named
    return tuple(shown)


def usable_devices() -> tuple[Device, ...]:
    """The devices of this machine that this process may use, as `visible`; none without a driver."""
    try:
        return visible(nvidia.read_devices()[0])
    except DriverError:
        return ()
