"""Recognises out-of-memory and full-disk errors of all libraries, and describes the former as an event."""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING

from finetune.events import OutOfMemory
from finetune.run.snapshot import free_blocks

if TYPE_CHECKING:
    from finetune.plan.plan import Plan
    from finetune.run.memory import MemorySampler

#: Texts of torch's allocator, of the driver (without the dot that transformers looks for), and of a CPU's allocator.
_MEMORY_TEXTS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)

_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
#: safetensors and torch's zip writer turn the errno into text of their own exceptions.
_DISK_TEXTS = ("No space left on device", "os error 28", "Disk quota exceeded", "PytorchStreamWriter failed writing file")


def is_out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory error of torch, the driver or Python, also as the cause of another error."""
    import torch

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(seen, RuntimeError) and any(text in str(seen) for text in _MEMORY_TEXTS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def describe(error: BaseException, phase: str, plan: Plan, memory: MemorySampler) -> OutOfMemory:
    """The event: error text, requested bytes, measured and forecast memory, and the settings in use."""
    settings = plan.settings
    return OutOfMemory(
        phase=phase, message=str(error).split("\n")[0][:500], asked_bytes=_asked_bytes(str(error)),
        micro_batch=settings.per_device_train_batch_size, max_length=settings.max_length,
        forecast_allocated_bytes=plan.forecast.peaks.get(phase) if plan.forecast else None,
        **free_blocks(not plan.card.is_cpu), **vars(memory.sample()),
    )  # fmt: skip


def _asked_bytes(text: str) -> int | None:
    match = re.search(r"[Tt]ried to allocate ([0-9.]+) ([KMG]iB)|you tried to allocate (\d+) bytes", text)
    if not match:
        return None
    if match[3]:
        return int(match[3])
    return round(float(match[1]) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2]])


def is_disk_full(error: BaseException) -> bool:
    """True when a write failed because the disk is full, also as the cause of another error."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _DISK_ERRNOS:
            return True
        if any(text in str(seen) for text in _DISK_TEXTS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
