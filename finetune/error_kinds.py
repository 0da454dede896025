"""Out-of-memory and full-disk errors of all libraries."""

from __future__ import annotations

import errno
from collections.abc import Iterator

#: Texts of torch's allocators, of the CUDA driver (without the final dot that transformers looks for), and of cuBLAS.
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
    """Return whether an error or one of its causes says that memory ran out."""
    import torch  # slow: a command that prints a recipe's error doesn't need it

    return any(
        isinstance(cause, (MemoryError, torch.OutOfMemoryError))
        or (isinstance(cause, RuntimeError) and any(text in str(cause) for text in _MEMORY_TEXTS))
        for cause in _with_causes(error)
    )


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error or one of its causes says that a disk is full or read-only."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _DISK_ERRNOS) or any(text in str(cause) for text in _DISK_TEXTS)
        for cause in _with_causes(error)
    )


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:  # libraries wrap the driver's error in their own
        yield error
        error = error.__cause__ or error.__context__
