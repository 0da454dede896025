"""A full disk, however a library words it."""

from __future__ import annotations

import errno

_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
#: safetensors and torch's zip writer turn the errno into text of their own exceptions.
_TEXTS = ("No space left on device", "os error 28", "Disk quota exceeded", "PytorchStreamWriter failed writing file")


def is_disk_full(error: BaseException) -> bool:
    """True when a write failed for want of space, also when that is the cause of another error."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _ERRNOS:
            return True
        if any(text in str(seen) for text in _TEXTS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
