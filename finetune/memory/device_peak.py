"""From allocated bytes to the peak memory of the device and of the host, with bounds."""

from __future__ import annotations

import dataclasses
import functools
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from finetune.card.allocator import expandable_segments
from finetune.card.host import PROCESS_BYTES
from finetune.memory.cache import cached, key_of
from finetune.memory.forecast import DRY_RUN_ERROR, EXPANDABLE, SEGMENTED, Forecast
from finetune.memory.ledger import USUAL_CAPABILITY, dry_run, replay_rows, replayed
from finetune.memory.shard_units import units_of
from finetune.memory.sharding import shard
from finetune.settings.compatibility import BUFFERS
from finetune.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from finetune.card.card import Card
    from finetune.memory.allocator_replay import Replay
    from finetune.memory.forecast import RowShape
    from finetune.memory.ledger import DryRun
    from finetune.settings import Settings

#: Two pages of expandable segments, which have 20 MiB: more than the share in small models.
PAGES = 40 * MIB
#: What torch reserved beyond the replay with expandable segments, at most, as a share (benchmarks/card_matrix.py).
REPLAY_ERROR = 0.02
_SEGMENTED_NOTE = "no expandable segments on this platform: fragmentation may reserve up to 14 % more than is allocated"
#: What malloc holds beyond a CPU's tensors: least, likely and most. 16 % fits four runs of the bundled model, 14 to 695 MiB.
MALLOC = (0.0, 0.16, 0.25)
#: What a run loads after the imports below, and the share by which a process differs from another one.
LOADED_LATER, PROCESS_ERROR = 29 * MIB, 0.05
#: A run's imports and a small step in a process of its own, which prints its resident bytes.
_PROCESS = """
import datasets, psutil, torch
import finetune.model.quantised_cache, finetune.run.training, finetune.run.worker
layer = torch.nn.Linear(512, 512)
layer(torch.ones(64, 512)).sum().backward()
torch.optim.AdamW(layer.parameters()).step()
print(psutil.Process().memory_info().rss)
"""
#: Growth that is worth a note, and rows so short that half of them show nothing.
SMALL_GROWTH, LEAST_WIDTH = 0.005, 64
#: Where uneven rows reserve more, the upper end is the most of the rows' order and of these other ones.
OTHER_ORDERS = (1, 2)
#: Limits at which a run is tried, as steps down from what it reserves without one.
LIMIT_STEP = 0.01


def make_forecast(
    config: dict[str, Any],
    settings: Settings,
    card: Card,
    *,
    rows: RowShape,
    budget_bytes: int | None = None,
    quick: bool = False,
) -> Forecast:
    """The forecast for a run of `settings` on `card` with these longest rows.

    `budget_bytes`: the card's memory that the run may take; where it is within the interval, the allocator is replayed with
    that limit. `quick`: no replay where only every n-th layer is checkpointed, which takes another dry run. Raises
    RecipeError for a model that can't be built.
    """
    micro = settings.per_device_train_batch_size
    capability = None if card.is_cpu else card.capability or USUAL_CAPABILITY
    one_gpu = dry_run(config, settings, micro_batch=micro, rows=rows, capability=capability)
    is_sharded, buckets = settings.launch.strategy != "ddp", _bucket_bytes(one_gpu, settings)
    run = one_gpu
    if is_sharded:
        run = shard(run, units_of(config, settings), settings)
    run = dataclasses.replace(
        run, peaks={phase: size + buckets if size and phase != "load" else size for phase, size in run.peaks.items()},
        parts={**run.parts, "gathered": run.parts["gathered"] + buckets},
    )  # fmt: skip
    highest = max(run.peaks.values())
    # A replay shows nothing of what does not fit anyway, nor of several processes' copies of gradients, whose moments of
    # allocation a dry run of one process does not have.
    is_alone = not (card.is_cpu or is_sharded) and settings.launch.num_processes == 1
    is_quick = quick and settings.activation_checkpointing_every_n_layers > 1
    can_replay = is_alone and highest <= card.total_bytes and not is_quick
    replay = _replayed(config, settings, card, rows) if can_replay else None
    if replay is not None and replay.segments:  # empty where segments can expand
        # torch counts whole blocks as allocated, which are larger than their tensors there
        peaks = {phase: max(size, replay.allocated.get(phase, 0)) for phase, size in run.peaks.items()}
        workspace = run.parts["workspace"] + peaks["train"] - run.peaks["train"]
        run = dataclasses.replace(run, peaks=peaks, parts={**run.parts, "workspace": workspace})
        highest = max(run.peaks.values())
    even, uncertain = settings.packing is True, 0
    if is_sharded:  # at least without all-gathered parameters, and without shards beside the full model while loading
        least_peaks = {phase: size - run.parts["gathered"] for phase, size in run.peaks.items()}
        uncertain = highest - max({**least_peaks, "load": min(run.peaks["load"], one_gpu.peaks["load"])}.values())
    forecast, pinned = forecast_of(run, card, replay, even=even, uncertain_bytes=uncertain), _pinned_bytes(run, card, settings)
    forecast = dataclasses.replace(
        forecast,
        peak_high_bytes=forecast.peak_high_bytes + max(0, run.peaks["train"] + buckets - highest),
        host_bytes=_host_bytes(run, pinned, settings),
        pinned_bytes=pinned,
        disk_bytes=_disk_bytes(one_gpu, settings),
        notes=run.notes + _notes(settings, card, replay),
    )
    least, most = forecast.peak_low_bytes, forecast.peak_high_bytes
    if replay is None or budget_bytes is None or not least <= budget_bytes < most or not (even or expandable_segments()):
        return forecast
    limit = budget_bytes - (card.context_bytes or 0) - card.context_uncertainty_bytes
    return dataclasses.replace(forecast, at_limit=_at_limit(config, settings, card, rows, replay, limit))


def forecast_of(run: DryRun, card: Card, replay: Replay | None, *, even: bool, uncertain_bytes: int = 0) -> Forecast:
    """The peak of the whole device, with its bounds, from the allocated bytes of a dry run and its allocator's replay.

    `even`: all micro-batches are equally long. `uncertain_bytes`: how far below its forecast the run may stay.
    """
    lower, likely, upper = _reserved(max(run.peaks.values()), card, replay, even=even)
    context, uncertainty = card.context_bytes or 0, card.context_uncertainty_bytes
    if card.is_cpu:
        uncertainty = round(PROCESS_ERROR * (context := process_bytes()))
    return Forecast(
        allocated_bytes=run.allocated_bytes,
        reserved_bytes=likely,
        peak_bytes=likely + context,
        peak_low_bytes=lower - uncertain_bytes + max(0, context - uncertainty),
        peak_high_bytes=upper + context + uncertainty,
        parts=run.parts,
        peaks=run.peaks,
        per_layer_bytes=run.per_layer_bytes,
        method=run.method,
        versions=run.versions,
        notes=run.notes,
        reserved_peaks=replay.reserved if replay else {},
        segments=replay.segments if replay else {},
    )


@functools.cache
def process_bytes() -> int:
    """Resident bytes of a training process on the CPU without its tensors, measured once for these libraries."""
    command, key = [sys.executable, "-c", _PROCESS], key_of(process=sys.version)
    try:
        return LOADED_LATER + int(cached(key, lambda: subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True)))
    except (OSError, subprocess.CalledProcessError):  # such as out of memory; it is measured by the next plan
        return LOADED_LATER + PROCESS_BYTES


def with_row_lengths(
    forecast: Forecast,
    config: dict[str, Any],
    settings: Settings,
    card: Card,
    *,
    rows: RowShape,
    lengths: Sequence[int],
    lowers: bool = False,
) -> Forecast:
    """The forecast with what torch reserves over steps of rows of these uneven lengths, where that is more; and a note.

    Unchanged for packed rows, for rows of one length, and where the allocator was not replayed. `lowers`: the upper end is that
    of these steps and not at least the interval of runs that are not replayed; without lengths, as the rows were not read, of
    steps with rows of any length.
    """
    expandable, read = expandable_segments(), bool(lengths)
    if lowers and not read:
        lengths = range(LEAST_WIDTH, rows.tokens + 1)
    if not forecast.reserved_peaks or settings.packing is True or len(set(lengths)) < 2 or rows.tokens < LEAST_WIDTH:
        return forecast
    reserved_by_steps = functools.partial(
        replay_rows, config, settings, rows=rows, capability=card.capability or USUAL_CAPABILITY, lengths=lengths,
        expandable=expandable,
    )  # fmt: skip
    reserved_bytes = reserved_by_steps()
    if reserved_bytes is None:
        return forecast
    likely = max(forecast.reserved_bytes, reserved_bytes)
    more = likely - forecast.reserved_bytes
    context = (card.context_bytes or 0) + card.context_uncertainty_bytes
    most = [likely]
    if lowers and reserved_bytes > (1 + SMALL_GROWTH) * forecast.reserved_bytes:
        other_orders = (reserved_by_steps(seed=seed) for seed in OTHER_ORDERS)
        most += [other for other in other_orders if other is not None]
    high = round((_with_replay_error(max(most)) if expandable else max(most)) * (1 + DRY_RUN_ERROR)) + context
    if not lowers:
        high = max(forecast.peak_high_bytes, high)
    share = max(most) / max(forecast.peaks.values()) - 1 if lowers else None
    notes = [note for note in forecast.notes if not lowers or note != _SEGMENTED_NOTE]
    return dataclasses.replace(
        forecast, reserved_bytes=likely, peak_bytes=forecast.peak_bytes + more, peak_high_bytes=high,
        reserved_peaks={  # torch keeps what the steps reserved
            phase: reserved if phase == "load" else max(reserved, reserved_bytes)
            for phase, reserved in forecast.reserved_peaks.items()
        },
        notes=(*notes, _growth_note(reserved_bytes / forecast.reserved_bytes - 1, share, expandable=expandable, read=read)),
    )  # fmt: skip


def with_margin_of(forecast: Forecast, other: Forecast, card: Card) -> Forecast:
    """The forecast with the margin above allocated memory that `other` has, where that lowers its upper end."""
    context = (card.context_bytes or 0) + card.context_uncertainty_bytes
    share = (other.peak_high_bytes - context) / max(other.peaks.values())
    least = forecast.reserved_bytes * (1 + DRY_RUN_ERROR) if forecast.reserved_peaks else 0.0
    high = round(max(least, share * max(forecast.peaks.values()))) + context
    return dataclasses.replace(forecast, peak_high_bytes=min(high, forecast.peak_high_bytes))


def _growth_note(growth: float, share: float | None, *, expandable: bool, read: bool) -> str:
    """Say how much more rows of uneven length reserve. `share`: reserved beyond allocated, where that is the upper end."""
    over = "rows of uneven length, the longest in the first two steps: replayed over more steps, torch's allocator reserves"
    more = f"{growth:.1%} more" if growth > SMALL_GROWTH else "no more"
    if expandable:
        return f"{over} {more} than for the longest alone, with expandable segments"
    packing = "; packing=true would avoid that" if growth > SMALL_GROWTH else ""
    end = "" if share is None else f"; at most {share:.1%} more than is allocated, the upper end where segments can't expand"
    unread = "" if read else "; the rows were not read, so those of every length were replayed"
    return f"{over} {more} than for the longest alone{packing}{end}{unread}"


def _at_limit(config: dict[str, Any], settings: Settings, card: Card, rows: RowShape, unlimited: Replay, limit: int) -> bool:
    """Whether the run stays within `limit` reserved bytes even if it allocates more by the dry run's largest error.

    `unlimited`: its replay without a limit. A lower limit moves the moments when blocks are returned, which may help or not:
    the run must succeed at every limit of a grid from what it reserves without one, so that more memory is never worse.

    Uneven rows without expandable segments are left out by the caller: the replay's one length does not show what they do.
    """
    share = 1 - limit / (1 + DRY_RUN_ERROR) / unlimited.reserved_bytes
    steps = max(0, math.ceil(share / LIMIT_STEP - 1e-3))  # a byte is no step
    limits = [round(unlimited.reserved_bytes * (1 - step * LIMIT_STEP)) for step in range(steps + 1)]
    if limits[-1] < unlimited.allocated_bytes:
        return False
    return all(_replayed(config, settings, card, rows, lower_limit) is not None for lower_limit in limits[1:])


def _replayed(
    config: dict[str, Any], settings: Settings, card: Card, rows: RowShape, limit: int | None = None
) -> Replay | None:
    return replayed(
        config, settings, micro_batch=settings.per_device_train_batch_size, rows=rows,
        capability=card.capability or USUAL_CAPABILITY, expandable=expandable_segments(), limit=limit,
    )  # fmt: skip


def _reserved(allocated: int, card: Card, replay: Replay | None, *, even: bool) -> tuple[int, int, int]:
    """Least, likely and most reserved bytes; of a CPU, resident ones. `even`: all micro-batches are equally long.

    The least is what is allocated: at the limit torch returns cached blocks. The most is what the replay reserves, with its
    error. Without expandable segments uneven rows fragment more than its one length shows: there it only raises the most.
    """
    shares = MALLOC if card.is_cpu else EXPANDABLE if expandable_segments() else SEGMENTED
    lower, likely, upper = (round(allocated * (1 + share)) for share in shares)
    if replay is None:
        upper += PAGES if shares is EXPANDABLE else 0
    else:
        likely = replay.reserved_bytes
        upper = _with_replay_error(likely) if expandable_segments() else likely if even else max(likely, upper)
    return round(lower * (1 - DRY_RUN_ERROR)), likely, round(upper * (1 + DRY_RUN_ERROR))


def _with_replay_error(reserved: int) -> int:
    return reserved + max(round(reserved * REPLAY_ERROR), PAGES)


def _bucket_bytes(run: DryRun, settings: Settings) -> int:
    """DDP's gradient buckets: a copy of all gradients (reducer.cpp in torch/csrc/distributed/c10d).

    The second step makes new ones. The first step's may live until its backward pass: NCCL's process group lets go of them in
    the first call after its watchdog, which wakes every 100 ms, has seen that they were sent (ProcessGroupNCCL.cpp).
    """
    is_ddp = settings.launch.num_processes > 1 and settings.launch.strategy == "ddp"
    return run.parts["adapters"] if is_ddp else 0


def _host_bytes(run: DryRun, training: int, settings: Settings) -> int:
    """Host memory of this machine: the process, and the larger of offloaded tensors and a merge into 16-bit weights.

    With FSDP and DeepSpeed: all local ranks, and local rank 0 gathers the model to save it.
    """
    launch = settings.launch
    if launch.strategy == "ddp":
        return PROCESS_BYTES + max(training, 2 * run.parameters)
    return launch.num_processes // launch.num_machines * PROCESS_BYTES + training + 2 * run.parameters


def _pinned_bytes(run: DryRun, card: Card, settings: Settings) -> int:
    if card.is_cpu:
        return 0
    if settings.layer_offloading != "nvme":
        return run.host_bytes
    # the layers are in a file, and are staged in as many buffers as there are on the card
    return run.host_bytes + BUFFERS * run.largest_offloaded_bytes - run.offloaded_bytes


def _disk_bytes(run: DryRun, settings: Settings) -> int:
    """Disk space: `save_total_limit` checkpoints and one being written (fp32 adapter, AdamW's two moments), adapter, merge.

    With evaluations the best checkpoint is kept beside the newest, and the last adapter beside the best.
    """
    adapter, best = run.parts["adapters"], int(bool(settings.eval_steps))
    layers = run.offloaded_bytes if settings.layer_offloading == "nvme" else 0
    return layers + (settings.save_total_limit + 1 + best) * 3 * adapter + (1 + best) * adapter + 2 * run.parameters


def _notes(settings: Settings, card: Card, replay: Replay | None) -> tuple[str, ...]:
    if card.is_cpu or expandable_segments():
        return ()
    if replay is None or settings.packing is not True:
        return (_SEGMENTED_NOTE,)
    share = f"{replay.reserved_bytes / replay.allocated_bytes - 1:.1%} more than is allocated"
    return (f"no expandable segments on this platform: fragmentation reserves {share}, by a replay of torch's allocator",)
