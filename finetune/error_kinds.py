"""Out-of-memory and full-disk errors of all libraries."""

from __future__ import annotations

import errno
from collections.abc import Iterator

#: Texts of torch's allocator, of the driver (without the dot that transformers looks for), and of a CPU's allocator.
_MEMORY_TEXTS = (
    "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "DefaultCPUAllocator: not enough memory",
)  # fmt: skip

_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
#: safetensors and torch's zip writer turn the errno into text of their own exceptions.
_DISK_TEXTS = (
    "No space left on device", "os error 28", "Disk quota exceeded", "File too large", "os error 27", "Read-only file system",
    "os error 30", "PytorchStreamWriter failed writing file", "] . unexpected pos ",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out."""
    import torch  # slow: a command that prints a recipe's error doesn't need it

    return any(
        isinstance(seen, (MemoryError, torch.OutOfMemoryError))
        or (isinstance(seen, RuntimeError) and any(text in str(seen) for text in _MEMORY_TEXTS))
        for seen in _with_causes(error)
    )


def is_disk_full(error: BaseException) -> bool:
    """Return whether a disk was full or read-only."""
    return any(
        (isinstance(seen, OSError) and seen.errno in _DISK_ERRNOS) or any(text in str(seen) for text in _DISK_TEXTS)
        for seen in _with_causes(error)
    )


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    # libraries wrap the driver's error in their own
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
