"""Followed runs: state and series from events, shared by all tabs.

A series takes bounded memory: its bins keep their extremes, so spikes stay visible.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import events
from finetune.run.directory import RunDirectory
from finetune.run.state import Pace, RunState, read_state

from .language import mark

if TYPE_CHECKING:
    from finetune.planner.plan import Plan

_PIECE_BYTES = 2**20  # read at a time
#: Metrics of each step; `Step.metrics` has the method's metrics.
METRICS = (
    "loss", "step_s", "peak_allocated_bytes", "peak_reserved_bytes", "card_used_bytes", "process_rss_bytes", *events.CHARTS,
)  # fmt: skip
_MARKS, _SAMPLES, _MESSAGES = 400, 24, 50  # the newest are kept
MOST_BINS = 1000  # per series; with more, two bins become one


@dataclass
class Bin:
    """Values of one metric at `width` steps, from step `index * width`."""

    low: float = math.inf
    low_step: int = 0
    high: float = -math.inf
    total: float = 0.0
    count: int = 0
    #: Count of values that are not numbers.
    missing: int = 0

    def add(self, step: int, value: float) -> None:
        if value < self.low:
            self.low, self.low_step = value, step
        self.high = max(self.high, value)
        self.total += value
        self.count += 1

    def merged(self, later: Bin) -> Bin:
        lowest = min(self, later, key=lambda bin_: bin_.low)
        return Bin(
            lowest.low, lowest.low_step, max(self.high, later.high), self.total + later.total, self.count + later.count,
            self.missing + later.missing,
        )  # fmt: skip

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


Point = tuple[float, float | None]


@dataclass
class Series:
    """One metric over steps, which may come in any order and repeatedly."""

    width: int = 1
    bins: dict[int, Bin] = field(default_factory=dict)
    first: float | None = None
    first_step: int | None = None
    last: float | None = None
    last_step: int | None = None
    #: Step and text of the newest value, if not a number.
    missing: tuple[int, str] | None = None

    def add(self, step: int, value: Any) -> None:
        """Add a value; None, `nan` and `inf` leave a gap."""
        bin_ = self.bins.setdefault(step // self.width, Bin())
        if isinstance(value, (int, float)) and math.isfinite(value):
            bin_.add(step, float(value))
            self.last, self.last_step, self.missing = float(value), step, None
            if self.first_step is None or step < self.first_step:
                self.first, self.first_step = float(value), step
        else:
            bin_.missing += 1
            self.missing = (step, mark("not measured") if value is None else str(value))
        while len(self.bins) > MOST_BINS:
            self._double_width()

    @property
    def lowest_bin(self) -> Bin | None:
        bins = [bin_ for bin_ in list(self.bins.values()) if bin_.count]
        return min(bins, key=lambda bin_: (bin_.low, bin_.low_step), default=None)

    def points(self, *, highest: bool = False) -> list[Point]:
        """Return each bin's mean or highest value, at its middle; empty bins are gaps."""
        # sorted copies the items in one call: another thread may add bins
        width, bins = self.width, sorted(self.bins.items())
        return [(width * index + (width - 1) / 2, bin_.high if highest and bin_.count else bin_.mean) for index, bin_ in bins]

    def _double_width(self) -> None:
        # bins are aligned to multiples of a power of two, so a bin depends only on its values and not on when they came:
        # appending keeps earlier bins, and reading a run in one go or step by step gives the same series
        merged: dict[int, Bin] = {}
        for index, bin_ in sorted(self.bins.items()):
            merged[index // 2] = merged[index // 2].merged(bin_) if index // 2 in merged else bin_
        self.bins, self.width = merged, self.width * 2


def smoothed(points: list[Point], factor: float = 0.8) -> list[Point]:
    """Return an exponential moving average; gaps stay. `factor`: weight of earlier values, below 1."""
    average, weight, averages = 0.0, 0.0, list[Point]()
    for step, value in points:
        if value is not None:
            average = factor * average + (1 - factor) * value
            weight = factor * weight + (1 - factor)
        # divided by the weight: no pull towards 0 at the beginning
        averages.append((step, average / weight if value is not None and weight else None))
    return averages


@dataclass
class Digest:
    """Series, marks and newest events of a run."""

    series: defaultdict[str, Series] = field(default_factory=lambda: defaultdict(Series))
    #: What happened at which step.
    marks: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=_MARKS))
    #: Answers of the first evaluation by prompt and images.
    first_samples: dict[tuple[str | None, tuple[str, ...]], events.Sample] = field(default_factory=dict)
    newest_samples: deque[events.Sample] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    messages: deque[events.Event] = field(default_factory=lambda: deque(maxlen=_MESSAGES))
    #: Highest value of each memory measure since the last retry.
    peaks: dict[str, int] = field(default_factory=dict)
    #: Most allocated bytes per phase.
    phase_peaks: dict[str, int] = field(default_factory=dict)
    #: Newest event by kind.
    newest: dict[str, events.Event] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    #: Starts and retries so far: each may repeat steps.
    attempts: int = 0
    #: Whether no step has ended since the last start or retry.
    is_new_attempt: bool = False

    @property
    def samples(self) -> list[events.Sample]:
        return [*self.first_samples.values(), *self.newest_samples]

    @property
    def newest_step(self) -> events.Step | None:
        newest = self.newest.get(events.Step.kind)
        return newest if isinstance(newest, events.Step) else None

    @property
    def step(self) -> int:
        return self.newest_step.step if self.newest_step else 0

    def add(self, event: events.Event) -> None:
        self.newest[event.kind] = event
        self.pace.add(event)
        match event:
            case events.Step():
                self._add_step(event)
                self._add_phase_peak("train", event)
            case events.Phase():
                self._add_phase_peak(event.phase, event)
            case events.Evaluation():
                self.series["eval_loss"].add(event.step, event.eval_loss)
                for name, value in event.metrics.items():
                    self.series[f"eval/{name}"].add(event.step, value)
                self.marks.append(("evaluation", event.step))
            case events.Checkpoint():
                self.marks.append(("save", event.step))
            case events.Retry():
                self.marks.append(("retry", self.step))
                # the smaller plan has other peaks
                self.peaks, self.phase_peaks = {}, {}
                self.attempts, self.is_new_attempt = self.attempts + 1, True
            case events.Start():
                if event.resumed_from:
                    self.marks.append(("resume", event.step or self.step))
                self.attempts, self.is_new_attempt = self.attempts + 1, True
            case events.Sample():
                first = next(iter(self.first_samples.values()), event)
                if event.step != first.step:
                    self.newest_samples.append(event)
                else:
                    self.first_samples[event.prompt, tuple(event.pictures)] = event
        if isinstance(event, (events.RunWarning, events.Retry, events.OutOfMemory, events.State, events.Start)):
            self.messages.append(event)

    def _add_phase_peak(self, phase: str, memory: events.Memory) -> None:
        if memory.peak_allocated_bytes is not None:
            self.phase_peaks[phase] = max(self.phase_peaks.get(phase, 0), memory.peak_allocated_bytes)

    def _add_step(self, event: events.Step) -> None:
        self.is_new_attempt = False
        values = {name: value for name in METRICS if (value := getattr(event, name)) is not None}
        for name, value in {**values, **event.metrics}.items():
            self.series[name].add(event.step, value)
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "card_used_bytes", "process_peak_rss_bytes"):
            value = getattr(event, name)
            if value is not None:
                self.peaks[name] = max(self.peaks.get(name, 0), value)


class LiveRun:
    """Follows the events of one run."""

    def __init__(self, run: RunDirectory) -> None:
        self.run, self.digest, self._file_key = run, Digest(), secrets.token_hex(4)
        self._reader, self._has_read_all = events.EventReader(run.events), False
        #: Held while events are added, and by readers of several bins that belong together.
        self.lock = threading.Lock()
        self._file_identity: tuple[int, int] | None = None
        self._plan: tuple[tuple[int, ...], Plan] | None = None

    @property
    def key(self) -> str:
        """Key that changes when values of earlier steps may change."""
        return f"{self._file_key}-{self.digest.attempts}"

    def refresh(self, limit_s: float = 0.5) -> bool:
        """Read new events for at most `limit_s`; return whether all are read."""
        deadline_s = time.monotonic() + limit_s
        with self.lock:
            self._restart_if_replaced()
            while True:
                offset_before = self._reader.offset
                for event in self._reader.new(_PIECE_BYTES):
                    self.digest.add(event)
                self._has_read_all = self._reader.offset == offset_before
                if self._has_read_all or time.monotonic() > deadline_s:
                    return self._has_read_all

    @property
    def read_share(self) -> float:
        """Return the share of events.jsonl read so far."""
        size = self.run.events.stat().st_size if self.run.events.exists() else 0
        return self._reader.offset / size if size else 1.0

    def plan(self) -> Plan:
        # a retry changes the plan
        stamp = tuple(path.stat().st_mtime_ns for path in (self.run.plan, self.run.adjustments) if path.exists())
        if self._plan is None or self._plan[0] != stamp:
            from finetune.run.retry import adjusted_plan

            self._plan = (stamp, adjusted_plan(self.run))
        return self._plan[1]

    @property
    def total_steps(self) -> int | None:
        newest = self.digest.newest_step
        return (newest.total_steps if newest else None) or self.plan().total_steps

    def state(self) -> RunState:
        # while a long history is read, the digest is old: read the end of the file
        return read_state(self.run, list(self.digest.newest.values()) if self._has_read_all else None)

    def _restart_if_replaced(self) -> None:
        try:
            stat = self.run.events.stat()
        except FileNotFoundError:
            return
        identity = (stat.st_dev, stat.st_ino)
        # another file, or a shorter one: read from the beginning
        if self._file_identity is not None and (identity != self._file_identity or stat.st_size < self._reader.offset):
            self._reader.offset, self.digest, self._file_key = 0, Digest(), secrets.token_hex(4)
        self._file_identity = identity


class LiveRuns(dict[Path, LiveRun]):
    """Followed runs by path; all tabs share one reader per run."""

    def follow(self, run: RunDirectory) -> LiveRun:
        return self.get(run.path) or self.setdefault(run.path, LiveRun(run))
