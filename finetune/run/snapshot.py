"""The CUDA allocator's history, as a file for PyTorch's viewer (pytorch.org/memory_viz), and its blocks at one moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.card import cuda

_MOST_ENTRIES = 100_000


def start_recording(on_cuda: bool) -> None:
    """Record every allocation with its stack from now on; costs some host memory and a few per cent of time."""
    if on_cuda:
        cuda.start_history(_MOST_ENTRIES)


def write_snapshot(path: Path, on_cuda: bool) -> Path | None:
    """Write the history; None without a card."""
    if not on_cuda:
        return None
    cuda.write_history(str(path))
    return path


def allocator_now(on_cuda: bool) -> dict[str, Any]:
    """The allocator's segments and blocks, and its history if recorded; empty without a card, or when it can't be asked."""
    if not on_cuda:
        return {}
    try:
        return cuda.snapshot() or {}
    except RuntimeError:  # after an error of the driver nothing on the card can be used
        return {}
