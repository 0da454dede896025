"""Every call of torch.cuda by a run, so that a test can record the calls."""

from __future__ import annotations

from finetune.card import nvidia


def open_card(number: int) -> None:
    """Create the CUDA context and run a first kernel."""
    import torch

    torch.cuda.init()
    torch.cuda.set_device(number)
    # raises RuntimeError or AssertionError where the GPU can't run kernels
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()


def device_of(number: int) -> str | int:
    """Return the model's device."""
    return number  # a function, so that tests on recorded cards can return the CPU


def uuid() -> str:
    """Return the GPU's UUID as the driver spells it."""
    import torch

    gpu_uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return nvidia.UUID_PREFIX + gpu_uuid.removeprefix(nvidia.UUID_PREFIX)


def free_bytes() -> int:
    """Return the GPU's free memory."""
    import torch

    return torch.cuda.mem_get_info()[0]


def limit_reserved(allowed_bytes: int) -> None:
    """Limit torch's allocator to these bytes."""
    import torch

    total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed_bytes / total_bytes))


def release_cached() -> None:
    """Return the allocator's free blocks to the driver."""
    import torch

    torch.cuda.empty_cache()


def reset_peak() -> None:
    """Reset the allocator's peaks."""
    import torch

    torch.cuda.reset_peak_memory_stats()


def allocator_bytes() -> dict[str, int | None]:
    """Return the allocator's statistics by their names in events."""
    import torch

    stats = torch.cuda.memory_stats()
    return {
        "allocated_bytes": stats.get("allocated_bytes.all.current", 0),
        "peak_allocated_bytes": stats.get("allocated_bytes.all.peak", 0),
        "reserved_bytes": stats.get("reserved_bytes.all.current", 0),
        "peak_reserved_bytes": stats.get("reserved_bytes.all.peak", 0),
        "inactive_split_bytes": stats.get("inactive_split_bytes.all.current", 0),
        "segments": stats.get("segment.all.current") or None,  # torch does not count expandable segments: 0 means unknown
        "peak_segments": stats.get("segment.all.peak") or None,
        "allocation_retries": stats.get("num_alloc_retries"),
    }


def has_plain_segments() -> bool:
    """Tell whether any segment can't expand."""
    import torch

    # needs a first allocation: without segments the answer is False
    return not all(segment["is_expandable"] for segment in torch.cuda.memory._snapshot()["segments"])


def try_kernel() -> bool:
    """Tell whether Triton's smallest kernel computes. Raises any error of Triton, the compiler or the driver."""
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
    return bool((values.cpu() == torch.arange(1, 1001)).all())
