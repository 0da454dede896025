"""Peak memory of the device and the host, with bounds, from the dry run's allocated bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from finetune.card.card import PROCESS_BYTES, expandable_segments
from finetune.memory.cache import cached, key_of
from finetune.memory.forecast import DRY_RUN_ERROR, EXPANDABLE, SEGMENTED, Forecast
from finetune.memory.ledger import DEFAULT_CAPABILITY, LargestStep
from finetune.memory.sharding import shard, units_of
from finetune.settings.compatibility import BUFFERS
from finetune.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from finetune.card.card import Card
    from finetune.memory.allocator_replay import Replay
    from finetune.memory.forecast import RowShape
    from finetune.memory.ledger import DryRun
    from finetune.settings import Settings

#: Two 20 MiB pages of expandable segments; in small models more than the share below.
PAGES_BYTES = 40 * MIB
#: Largest share that torch reserved beyond the replay with expandable segments (benchmarks/card_matrix.py).
REPLAY_ERROR = 0.02
#: Share that malloc holds beyond a CPU's tensors: (least, likely, most). 16 % fits four runs of 14 to 695 MiB.
MALLOC = (0.0, 0.16, 0.25)
#: Bytes that a run loads after the imports below, and the relative spread between processes.
LOADED_LATER_BYTES, PROCESS_ERROR = 29 * MIB, 0.05
#: Program that imports what a run imports, takes a small step and prints its resident bytes.
_PROGRAM = """
import datasets, psutil, torch
import finetune.model.build, finetune.run.training, finetune.run.worker
layer = torch.nn.Linear(512, 512)
layer(torch.ones(64, 512)).sum().backward()
torch.optim.AdamW(layer.parameters()).step()
print(psutil.Process().memory_info().rss)
"""
#: Growth too small for a figure in the note, and tokens below which rows are too short for a dry run at half their length.
SMALL_GROWTH, LEAST_WIDTH = 0.005, 64
#: Step between the limits at which a run is replayed, as a share of the bytes that it reserves without a limit.
LIMIT_STEP = 0.01


def make_forecast(
    config: dict[str, Any],
    settings: Settings,
    card: Card,
    *,
    rows: RowShape,
    # GPU memory the run may take; if it is between the forecast's bounds, the allocator is replayed with this limit
    budget_bytes: int | None = None,
    # tokens of every row: the allocator is also replayed with rows of these lengths, which can only raise the forecast
    lengths: Sequence[int] = (),
) -> Forecast:
    """Forecast a run of `settings` on `card` with these longest rows. Raises RecipeError for a model that can't be built."""
    step = LargestStep(config, settings, rows, None if card.is_cpu else card.capability or DEFAULT_CAPABILITY)
    one_gpu = step.dry_run()
    is_sharded_run = settings.launch.is_sharded
    run = shard(one_gpu, units_of(config, settings), settings) if is_sharded_run else one_gpu
    # DDP's gradient buckets: a copy of all gradients in each phase after loading (torch/csrc/distributed/c10d/reducer.cpp)
    bucket_bytes = one_gpu.parts["adapters"] if settings.launch.num_processes > 1 and not is_sharded_run else 0
    peaks = {phase: size + bucket_bytes if size and phase != "load" else size for phase, size in run.peaks.items()}
    run = dataclasses.replace(run, peaks=peaks, parts={**run.parts, "gathered": run.parts["gathered"] + bucket_bytes})
    # A replay can't help a run that does not fit anyway, nor show when several processes allocate their gradient copies.
    can_replay = not (card.is_cpu or is_sharded_run) and settings.launch.num_processes == 1
    fits = max(run.peaks.values()) <= card.total_bytes
    replay = step.replayed(expandable=expandable_segments()) if can_replay and fits else None
    if replay is not None and replay.segments:  # empty where segments can expand
        run = _in_whole_blocks(run, replay)
    highest_peak = max(run.peaks.values())
    uncertain_bytes = 0
    if is_sharded_run:  # the lower end: no all-gathered parameters, and no shards beside the full model while loading
        least_peaks = {phase: size - run.parts["gathered"] for phase, size in run.peaks.items()}
        least_peaks["load"] = min(run.peaks["load"], one_gpu.peaks["load"])
        uncertain_bytes = highest_peak - max(least_peaks.values())
    has_equal_rows = settings.packing is True
    forecast = forecast_of(run, card, replay, has_equal_rows=has_equal_rows, uncertain_bytes=uncertain_bytes)
    pinned_bytes = _pinned_bytes(run, card, settings)
    forecast = dataclasses.replace(
        forecast,
        # DDP's second step allocates new buckets, and the first step's may live until the second backward pass: NCCL's process
        # group releases them in the first call after its watchdog, which wakes every 100 ms, has seen that they were sent
        # (ProcessGroupNCCL.cpp)
        peak_high_bytes=forecast.peak_high_bytes + max(0, run.peaks["train"] + bucket_bytes - highest_peak),
        host_bytes=_host_bytes(run, pinned_bytes, settings),
        pinned_bytes=pinned_bytes,
        disk_bytes=_disk_bytes(one_gpu, settings),
        notes=run.notes + _notes(settings, card, replay),
    )
    # without expandable segments, a replay of one length says nothing about rows of uneven length
    if replay is not None and budget_bytes is not None and (has_equal_rows or expandable_segments()):
        limit = budget_bytes - (card.context_bytes or 0) - card.context_uncertainty_bytes
        is_uncertain = forecast.peak_low_bytes <= budget_bytes < forecast.peak_high_bytes
        forecast = dataclasses.replace(forecast, at_limit=is_uncertain and _fits_limit(step, replay, limit))
    return _over_row_lengths(forecast, step, lengths, card)


def _in_whole_blocks(run: DryRun, replay: Replay) -> DryRun:
    # torch counts whole blocks as allocated, which may be larger than their tensors
    peaks = {phase: max(size, replay.allocated.get(phase, 0)) for phase, size in run.peaks.items()}
    workspace = run.parts["workspace"] + peaks["train"] - run.peaks["train"]  # so that the parts add up to the peak
    return dataclasses.replace(run, peaks=peaks, parts={**run.parts, "workspace": workspace})


def forecast_of(run: DryRun, card: Card, replay: Replay | None, *, has_equal_rows: bool, uncertain_bytes: int = 0) -> Forecast:
    """Return the device peak with bounds, from a dry run and the allocator's replay."""
    # `uncertain_bytes`: by how much the run's peak may be lower than forecast
    lower, likely, upper = _reserved(max(run.peaks.values()), card, replay, has_equal_rows=has_equal_rows)
    context, uncertainty = card.context_bytes or 0, card.context_uncertainty_bytes
    if card.is_cpu:
        context = process_bytes()
        uncertainty = round(PROCESS_ERROR * context)
    return Forecast(
        allocated_bytes=run.allocated_bytes,
        reserved_bytes=likely,
        peak_bytes=likely + context,
        peak_low_bytes=lower - uncertain_bytes + max(0, context - uncertainty),
        peak_high_bytes=upper + context + uncertainty,
        parts=run.parts,
        peaks=run.peaks,
        layers=run.layers,
        method=run.method,
        notes=run.notes,
        reserved_peaks=replay.reserved if replay else {},
        segments=replay.segments if replay else {},
    )


@functools.cache
def process_bytes() -> int:
    """Return the resident bytes of a CPU training process without its tensors."""
    command, key = [sys.executable, "-c", _PROGRAM], key_of(process=sys.version)
    try:
        return LOADED_LATER_BYTES + cached(key, int, lambda: int(subprocess.check_output(command, stderr=subprocess.DEVNULL)))
    except (OSError, subprocess.CalledProcessError):  # e.g. out of memory; the next plan measures again
        return LOADED_LATER_BYTES + PROCESS_BYTES


def _over_row_lengths(forecast: Forecast, step: LargestStep, lengths: Sequence[int], card: Card) -> Forecast:
    """Raise the forecast, with a note, to the bytes reserved over steps with rows of these lengths."""
    # packed rows have one length
    if not forecast.reserved_peaks or step.settings.packing is True or len(set(lengths)) < 2 or step.rows.tokens < LEAST_WIDTH:
        return forecast
    expandable = expandable_segments()
    reserved_bytes = step.reserved_over(lengths, expandable=expandable)
    if reserved_bytes is None:
        return forecast
    growth = reserved_bytes / forecast.reserved_bytes - 1
    likely = max(forecast.reserved_bytes, reserved_bytes)
    high = round(_with_replay_error(likely) * (1 + DRY_RUN_ERROR)) + (card.context_bytes or 0) + card.context_uncertainty_bytes
    more, advice = (f"{growth:.1%}", "; packing=true would avoid that") if growth > SMALL_GROWTH else ("no", "")
    note = (
        "rows of uneven length, the longest in the first two steps: in a replay of more steps, torch's allocator reserves "
        f"{more} more than for the longest row alone{', with expandable segments' if expandable else advice}"
    )
    return dataclasses.replace(
        forecast, reserved_bytes=likely, peak_bytes=forecast.peak_bytes + likely - forecast.reserved_bytes,
        peak_high_bytes=max(forecast.peak_high_bytes, high), notes=(*forecast.notes, note),
        reserved_peaks={  # torch keeps what the steps reserved
            phase: reserved if phase == "load" else max(reserved, reserved_bytes)
            for phase, reserved in forecast.reserved_peaks.items()
        },
    )  # fmt: skip


def _fits_limit(step: LargestStep, unlimited: Replay, limit: int) -> bool:
    """Tell whether the run fits `limit` reserved bytes even with the dry run's largest error."""
    # A lower limit moves the moments when blocks are returned, which may help or not. So that more memory is never worse, the
    # run must also fit every limit between `limit` and the bytes reserved without a limit, in steps of LIMIT_STEP.
    missing_share = 1 - limit / (1 + DRY_RUN_ERROR) / unlimited.reserved_bytes
    count = max(0, math.ceil(missing_share / LIMIT_STEP - 1e-3))  # a difference of some bytes needs no further limit
    limits = [round(unlimited.reserved_bytes * (1 - number * LIMIT_STEP)) for number in range(1, count + 1)]
    if limits and limits[-1] < max(unlimited.allocated.values()):
        return False
    return all(step.replayed(expandable=expandable_segments(), limit=lower_limit) is not None for lower_limit in limits)


def _reserved(allocated: int, card: Card, replay: Replay | None, *, has_equal_rows: bool) -> tuple[int, int, int]:
    """Return the least, likely and most reserved bytes; on the CPU, resident bytes."""
    # least: allocated bytes alone, as torch returns cached blocks at the limit
    shares = MALLOC if card.is_cpu else EXPANDABLE if expandable_segments() else SEGMENTED
    lower, likely, upper = (round(allocated * (1 + share)) for share in shares)
    if replay is None:
        upper += PAGES_BYTES if shares is EXPANDABLE else 0
    else:
        likely = replay.reserved_bytes
        if expandable_segments():
            upper = _with_replay_error(likely)
        else:  # rows of uneven length fragment more than the replay's one length shows
            upper = likely if has_equal_rows else max(likely, upper)
    return round(lower * (1 - DRY_RUN_ERROR)), likely, round(upper * (1 + DRY_RUN_ERROR))


def _with_replay_error(reserved: int) -> int:
    return reserved + max(round(reserved * REPLAY_ERROR), PAGES_BYTES)


def _host_bytes(run: DryRun, pinned_bytes: int, settings: Settings) -> int:
    launch, model_bytes = settings.launch, 2 * run.parameters  # 16-bit weights
    if not launch.is_sharded:
        # offloading ends before the weights are merged
        return PROCESS_BYTES + max(pinned_bytes, model_bytes)
    # all local ranks; local rank 0 gathers the model to save it
    return launch.num_processes // launch.num_machines * PROCESS_BYTES + pinned_bytes + model_bytes


def _pinned_bytes(run: DryRun, card: Card, settings: Settings) -> int:
    if card.is_cpu:
        return 0
    if settings.layer_offloading != "nvme":
        return run.host_bytes
    # layers in a file are staged in as many buffers as on the GPU
    return run.host_bytes + BUFFERS * run.largest_offloaded_bytes - run.offloaded_bytes


def _disk_bytes(run: DryRun, settings: Settings) -> int:
    # with evaluations the best checkpoint is kept beside the newest
    adapter_bytes, best = run.parts["adapters"], int(bool(settings.eval_steps))
    layer_bytes = run.offloaded_bytes if settings.layer_offloading == "nvme" else 0
    checkpoint_bytes = 3 * adapter_bytes  # the fp32 adapter and AdamW's two moments
    checkpoints = settings.save_total_limit + 1 + best  # one more while a checkpoint is written
    merged_bytes = 2 * run.parameters  # 16-bit weights
    return layer_bytes + checkpoints * checkpoint_bytes + adapter_bytes + merged_bytes


def _notes(settings: Settings, card: Card, replay: Replay | None) -> tuple[str, ...]:
    if card.is_cpu or expandable_segments():
        return ()
    # the replay repeats one micro-batch: it describes a run only if packing makes all rows equally long
    if replay is None or settings.packing is not True:
        return ("no expandable segments on this platform: fragmentation may reserve 14 % more than allocated",)
    share = f"{replay.reserved_bytes / max(replay.allocated.values()) - 1:.1%} more than allocated"
    return (f"no expandable segments on this platform: fragmentation reserves {share}, by a replay of torch's allocator",)
