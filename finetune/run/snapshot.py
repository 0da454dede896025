"""The CUDA allocator's history, as a file for PyTorch's viewer (pytorch.org/memory_viz), and its free blocks."""

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


def free_blocks(on_cuda: bool) -> dict[str, Any]:
    """Size of the largest free block in reserved memory, and number of free blocks; null without a card. Slow."""
    if not on_cuda:
        return {"largest_free_block_bytes": None, "free_blocks": None}
    sizes = list(cuda.free_block_sizes())
    return {"largest_free_block_bytes": max(sizes, default=0), "free_blocks": len(sizes)}
