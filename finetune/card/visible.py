"""Visible GPUs, by CUDA_VISIBLE_DEVICES, and the choice of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from finetune.card import nvidia
from finetune.card.nvidia import Build, Device, Driver, DriverError, LostCard, driver_message, in_container
from finetune.errors import NoCard
from finetune.units import format_bytes

_NO_CARD_FIX = "Plan for a GPU of the catalogue (finetune plan RECIPE --gpu rtx-4090), or set gpu=cpu for a tiny model."
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


def choose_device(
    gpu: str, wanted: Callable[[Device], bool] | None, processes: int, name: str = ""
) -> tuple[Device, str, tuple[str, str]]:
    """Return the GPU with most free memory, the reason, and torch's problem with its fix. Raises NoCard."""
    wanted_gpu = f"this recipe is for {_with_article(name)}; " if name else f"gpu: {gpu}, but "
    try:
        devices, lost_cards = nvidia.read_devices()
        driver = nvidia.driver_versions()
    except DriverError as error:
        fix = f"{nvidia.CONTAINER_FIX} {_NO_CARD_FIX}" if in_container() else _NO_CARD_FIX
        if error.was_updated:
            fix = f"The driver was updated: restart the machine. {_NO_CARD_FIX}"
        raise NoCard(f"{wanted_gpu}this machine has no usable NVIDIA GPU ({driver_message(error)})", fix) from None
    allowed = visible(devices)
    # `wanted` comes from the recipe's `gpu`; CUDA_VISIBLE_DEVICES may hide a GPU that would match
    candidates = [device for device in allowed if wanted is None or wanted(device)]
    if not candidates:
        hidden = f", hidden by {nvidia.VISIBLE_VARIABLE}={visible_devices()!r}"
        gpus = [
            f"{device.index} ({device.name}, {format_bytes(device.total_bytes)}{'' if device in allowed else hidden})"
            for device in devices
        ]
        gpus += [f"{card.index}, which can't be used ({card.why})" for card in lost_cards]
        plan_only = f"To plan only: finetune plan RECIPE --gpu {gpu if name else 'rtx-4090'}."
        fix = f"Set gpu=auto, or the index of one of these GPUs. {plan_only}" if allowed else _NO_CARD_FIX
        if lost_cards and not devices:
            fix = f"{lost_cards[0].fix} {fix}"
        raise NoCard(f"{wanted_gpu}this machine has {', '.join(gpus) or 'no GPU'}", fix)
    chosen = max(candidates, key=lambda device: device.free_bytes)
    reason = _reason(chosen, allowed, devices, lost_cards)
    if processes > 1:
        used = allowed[:processes]  # a run uses the first GPUs, and its plan must fit on each
        chosen = min(used, key=lambda device: device.free_bytes)
        reason = f"; GPU {chosen.index} has the least free memory of the run's {len(used)} GPUs"
    return chosen, reason, problem_of_torch(chosen.name, chosen.capability, driver) or ("", "")


def _with_article(name: str) -> str:
    short = name.replace("NVIDIA ", "").replace("GeForce ", "")
    return f"{'an' if short[0] in 'AEFHILMNORSX' else 'a'} {short}"


def _reason(chosen: Device, allowed: tuple[Device, ...], devices: tuple[Device, ...], lost_cards: tuple[LostCard, ...]) -> str:
    reason = ""
    others = [device for device in allowed if device != chosen]
    if others:
        texts = (f"gpu={device.index} is {device.name} with {format_bytes(device.free_bytes)} free" for device in others)
        reason = f"; GPU {chosen.index}, chosen from {len(allowed)} ({', '.join(texts)})"
    elif len(devices) > 1:
        reason = f"; GPU {chosen.index}, set by {nvidia.VISIBLE_VARIABLE}"
    return reason + "".join(f"; GPU {card.index} can't be used ({card.why})" for card in lost_cards)


def problem_of_torch(name: str, capability: tuple[int, int] | None, driver: Driver | None) -> tuple[str, str] | None:
    """Return why torch can't use this GPU, and the fix."""
    import torch

    build = Build(torch.__version__, torch.version.cuda, torch.version.hip)
    return nvidia.build_problem(build, driver) or nvidia.capability_problem(build, name, capability)
