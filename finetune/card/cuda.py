"""Every call of torch.cuda by a run. No other module of the run calls it, so a test can record the calls."""

from __future__ import annotations

from typing import Any

from finetune.card import nvidia


def open_card(number: int) -> None:
    """Make the card current, create the CUDA context and run a first kernel. Raises RuntimeError or AssertionError."""
    import torch

    torch.cuda.init()
    torch.cuda.set_device(number)
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()


def device_of(number: int) -> str | int:
    """The device of the model: `number`, torch's index of the card."""
    return number


def uuid() -> str:
    """UUID of the current card, as the driver spells it."""
    import torch

    gpu_uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return nvidia.UUID_PREFIX + gpu_uuid.removeprefix(nvidia.UUID_PREFIX)


def total_bytes() -> int:
    """Memory of the current card."""
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def free_bytes() -> int:
    """Free memory of the current card, now."""
    import torch

    return torch.cuda.mem_get_info()[0]


def limit_reserved(share: float) -> None:
    """Let torch's allocator reserve no more than this share of the card's total; more is out of memory."""
    import torch

    torch.cuda.set_per_process_memory_fraction(share)


def release_cached() -> None:
    """Give the allocator's free blocks back to the driver."""
    import torch

    torch.cuda.empty_cache()


def reset_peak() -> None:
    """Reset the peaks to the current values."""
    import torch

    torch.cuda.reset_peak_memory_stats()


def allocator_bytes() -> dict[str, int | None]:
    """The allocator's bytes and segments now and at the peak, by their names in an event's memory.

    torch does not count expandable segments: none at all beside reserved memory is unknown.
    """
    import torch

    stats = torch.cuda.memory_stats()
    return {
        "allocated_bytes": stats.get("allocated_bytes.all.current", 0),
        "peak_allocated_bytes": stats.get("allocated_bytes.all.peak", 0),
        "reserved_bytes": stats.get("reserved_bytes.all.current", 0),
        "peak_reserved_bytes": stats.get("reserved_bytes.all.peak", 0),
        "inactive_split_bytes": stats.get("inactive_split_bytes.all.current", 0),
        "segments": stats.get("segment.all.current") or None,
        "peak_segments": stats.get("segment.all.peak") or None,
        "allocation_retries": stats.get("num_alloc_retries"),
    }


def snapshot() -> dict[str, Any]:
    """Every segment of the allocator with its blocks, and the history if recorded. Slow."""
    import torch

    return torch.cuda.memory._snapshot()


def has_plain_segments() -> bool:
    """Whether any segment of the allocator can't expand; asked after its first allocation."""
    return not all(segment["is_expandable"] for segment in snapshot()["segments"])


def start_history(most_entries: int) -> None:
    """Record every allocation with its stack from now on."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=most_entries)


def write_history(path: str) -> None:
    """Write the recorded allocations to a file."""
    import torch

    torch.cuda.memory._dump_snapshot(path)


def try_kernel() -> dict[str, Any]:
    """Compile Triton's smallest kernel and run it on the card: it adds one to each of a thousand numbers.

    Raises what Triton, the compiler or the driver raises.
    """
    global tl  # a kernel looks names up in its module
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def add_one(values, count, block: tl.constexpr):  # type: ignore[name-defined]
        offsets = tl.program_id(0) * block + tl.arange(0, block)
        inside = offsets < count
        tl.store(values + offsets, tl.load(values + offsets, mask=inside) + 1, mask=inside)

    values = torch.arange(1000, device="cuda", dtype=torch.float32)
    add_one[(4,)](values, 1000, block=256)
    return {"numbers_are_right": bool((values.cpu() == torch.arange(1, 1001)).all())}
