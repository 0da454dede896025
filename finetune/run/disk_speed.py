"""Read speed of a drive, measured in the folder where a file of weights is or will be."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from finetune.errors import DiskFull
from finetune.files import existing_parent
from finetune.units import MIB

#: Bytes that are written and read, one piece after another, and the seconds that each of both takes at most.
SAMPLE_BYTES, PIECE_BYTES, MOST_S = 256 * MIB, 8 * MIB, 3.0


def measure_read_rate(folder: Path, sample_bytes: int = SAMPLE_BYTES) -> float | None:
    """Bytes per second that are read of a new file in `folder`, past the system's cache; None where that can't be avoided.

    Takes up to two times MOST_S and leaves nothing. Raises DiskFull when the file can't be written.
    """
    if not hasattr(os, "posix_fadvise"):  # Windows
        return None
    parent = existing_parent(folder)
    try:
        with tempfile.TemporaryFile(dir=parent, buffering=0) as file:
            written, piece, end = 0, os.urandom(PIECE_BYTES), time.monotonic() + MOST_S
            while written < sample_bytes and time.monotonic() < end:
                written += file.write(piece)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            buffer, n_read, begin = bytearray(PIECE_BYTES), 0, time.perf_counter()
            while n_read < written and time.perf_counter() < begin + MOST_S:
                n_read += file.readinto(buffer)
            return n_read / (time.perf_counter() - begin)
    except OSError as error:
        raise DiskFull(
            f"{parent}: a file of weights can't be written there: {error.strerror or error}",
            "Free some space, or set FINETUNE_CACHE to a folder on another drive.",
        ) from None
