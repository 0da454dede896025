"""Error of the replayed caching allocator against allocated and reserved memory that others measured.

    python benchmarks/reserved_accuracy.py [CSV]

Takes the rows of `forecast_accuracy.py` that have both metrics: fitcheck-llm's loop on a Tesla T4, with torch's default
allocator (no expandable segments). Two optimizer steps are recorded on fake tensors of a few layers, their events repeated for
the other layers, and replayed after the allocations of loading. As in the measured program, the second step has the peaks.
No constant is fitted to these rows. The order in which transformers 5.0's loading threads finish differs from run to run and is
not replayed: tensors are loaded one after another.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PretrainedConfig

import forecast_accuracy as accuracy
from finetune.memory.allocator_replay import play
from finetune.memory.caching_allocator import CachingAllocator, Ties
from finetune.memory.depth import at_depth, inspect_layers, plan_depth
from finetune.memory.fake_model import materialise
from finetune.memory.rules import cublas_workspace_bytes, rules_for
from finetune.memory.simulate import garbage_collection_paused, observe
from finetune.memory.trace import RELEASED, Event, Trace
from finetune.memory.tracker import StorageTracker
from finetune.units import MIB
from forecast_accuracy import Row

#: What the driver can hand out: the T4's visible memory less the context that was measured.
T4_LIMIT = round((14912 - 140.875) * MIB)


def read_rows(path: Path) -> list[Row]:
    """The rows of `forecast_accuracy` whose reserved memory was measured, too."""
    return [row for row in accuracy.read_rows(path) if row.reserved_bytes]


def replayed(row: Row) -> CachingAllocator:
    """Return the allocator after the row's run on a T4, with the peaks of the second step."""
    config = accuracy.config_of(row)
    trace = _steps(row, config)
    allocator = CachingAllocator(expandable=False, limit=T4_LIMIT, ties=Ties.ADDRESS)  # of torch 2.10, which ran the rows
    run = functools.partial(play, allocator, trace.persistent)
    run([(-2 - number, size) for number, size in _loading(row, config)])
    run(trace.parts["step 0"])
    allocator.reset_peaks()
    run(trace.parts["step 1"])
    return allocator


def _steps(row: Row, config: PretrainedConfig) -> Trace:
    """Two steps of the measured loop. Activations that are kept differ in the first layer, whose input needs no gradient."""
    depth = plan_depth(inspect_layers(config)[0], 1, int(not row.checkpointing))
    tracker = StorageTracker(rules_for(accuracy.T4), workspace_bytes=cublas_workspace_bytes(accuracy.T4))
    with garbage_collection_paused():
        model = accuracy.model_of(row, at_depth(config, depth.run))
        observe(model, tracker)
        with accuracy.as_measured(tracker):
            materialise(model, tracker, dtype=torch.float16)
            optimizer = accuracy.optimizer_of(model)
            for number in range(2):
                tracker.recording.begin_part(f"step {number}")
                optimizer.zero_grad(set_to_none=True)
                accuracy.step(row, model, optimizer, tracker)
        trace = tracker.recording.trace(depth)
        del model
    return trace


def _loading(row: Row, config: PretrainedConfig) -> Iterator[Event]:
    """Yield the allocations of the measured program before its first step, in order."""
    base = accuracy.base_of(row, config)
    adapters = [
        parameter.numel()
        for _, module in accuracy.model_of(row, config).named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "lora_B")
        for parameter in (*module.lora_A.parameters(), *module.lora_B.parameters())
    ]
    numbers = itertools.count()
    yield from _load_4bit(base, numbers) if row.four_bit else _load_16bit(base, numbers)
    # PEFT makes adapters in the base's dtype, then casts them to fp32; beside 4-bit weights they are fp32 from the start.
    adapter_blocks = [(next(numbers), elements) for elements in adapters]
    yield from ((number, elements * (4 if row.four_bit else 2)) for number, elements in adapter_blocks)
    if not row.four_bit:
        for number, elements in adapter_blocks:
            yield next(numbers), 4 * elements
            yield number, RELEASED
    yield next(numbers), row.micro_batch * row.tokens * 8


def _load_16bit(base: torch.nn.Module, numbers: Iterator[int]) -> Iterator[Event]:
    """`model.cuda()`: one tensor after another, in the order of `nn.Module._apply`, children first."""
    seen: set[int] = set()

    def tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
        for child in module.children():
            yield from tensors(child)
        yield from (value for value in (*module._parameters.values(), *module._buffers.values()) if value is not None)

    for value in tensors(base):
        if id(value) not in seen:
            seen.add(id(value))
            yield next(numbers), value.nbytes


def _load_4bit(base: torch.nn.Module, numbers: Iterator[int]) -> Iterator[Event]:
    """transformers with a device map: a block as large as the model is allocated and freed (caching_allocator_warmup); each
    tensor is loaded in 16 bit, in the natural order of names, and quantised; `prepare_model_for_kbit_training` casts the rest
    to fp32.
    """
    parameters = {name: value for name, value in base.named_parameters() if value is not None}
    packed = {name for name, value in parameters.items() if type(value).__name__ == "Params4bit"}
    buffers = [buffer.nbytes for buffer in base.buffers()]
    counts = {name: value.numel() for name, value in parameters.items()}
    whole = sum(count // 2 if name in packed else 2 * count for name, count in counts.items()) + sum(buffers)
    warm_up = next(numbers)
    yield warm_up, whole // 2 * 2
    yield warm_up, RELEASED
    halves = {}
    for name in sorted(counts, key=_natural):
        halves[name], count = next(numbers), counts[name]
        yield halves[name], 2 * count
        if name in packed:  # scales of 64 values each, codes, and the code book
            for size in (-(-count // 64) * 4, (count + 1) // 2, 64):
                yield next(numbers), size
            yield halves[name], RELEASED
    for size in buffers:
        yield next(numbers), size
    for name, count in counts.items():
        if name not in packed:
            yield next(numbers), 4 * count
            yield halves[name], RELEASED


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def main() -> int:
    """Print an object for each row, and the count of rows; returns 1 without rows."""
    rows = read_rows(Path(sys.argv[1]) if len(sys.argv) > 1 else accuracy.REFERENCE / "measured_memory.csv")
    for row in rows:
        run = replayed(row)
        line = {
            "row": row.source, "allocated_bytes": run.peak_allocated, "reserved_bytes": run.peak_reserved,
            "allocated_error": run.peak_allocated / row.measured_bytes - 1,
            "reserved_error": run.peak_reserved / (row.reserved_bytes or 0) - 1,
        }  # fmt: skip
        print(json.dumps(line), flush=True)
    print(f"{len(rows)} rows of fitcheck-llm have tier A and both metrics")
    return int(not rows)


if __name__ == "__main__":
    sys.exit(main())
