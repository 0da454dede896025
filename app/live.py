"""Followed runs: state and series from events, shared by all tabs.

A series is in bounded memory: bins keep the lowest and highest value, so spikes stay visible.
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
from finetune.run.pace import Pace
from finetune.run.state import RunState, read_state

from .language import mark

if TYPE_CHECKING:
    from finetune.planner.plan import Plan

#: Bytes that are read at a time.
_PIECE_BYTES = 2**20
#: Metrics of each step; `Step.metrics` has the method's metrics.
METRICS = (
    "loss", "step_s", "peak_allocated_bytes", "peak_reserved_bytes", "card_used_bytes", "process_rss_bytes", *events.CHARTS,
)  # fmt: skip
_MARKS, _SAMPLES, _MESSAGES = 400, 24, 50
#: Bins kept.
MOST_BINS = 1000


@dataclass
class Bin:
    """Values of the steps from `index * width`."""

    low: float = math.inf
    low_step: int = 0
    high: float = -math.inf
    total: float = 0.0
    count: int = 0
    #: Count of values that are not numbers.
    missing: int = 0

    def take(self, step: int, value: float) -> None:
        if value < self.low:
            self.low, self.low_step = value, step
        self.high = max(self.high, value)
        self.total += value
        self.count += 1

    def merged(self, later: Bin) -> Bin:
        lowest = min(self, later, key=lambda part: part.low)
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
    """One metric. Steps may come in any order and repeatedly, as after a resume."""

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
        part = self.bins.setdefault(step // self.width, Bin())
        if isinstance(value, (int, float)) and math.isfinite(value):
            part.take(step, float(value))
            self.last, self.last_step, self.missing = float(value), step, None
            if self.first_step is None or step < self.first_step:
                self.first, self.first_step = float(value), step
        else:
            part.missing += 1
            self.missing = (step, mark("not measured") if value is None else str(value))
        while len(self.bins) > MOST_BINS:
            self._double()

    @property
    def low(self) -> float | None:
        return min((part.low for part in self.bins.values() if part.count), default=None)

    def points(self, *, highest: bool = False) -> list[Point]:
        """Return mean or highest value per bin, at the bin's middle; empty bins are gaps."""
        middle, bins = (self.width - 1) / 2, sorted(self.bins.items())
        return [(index * self.width + middle, part.high if highest and part.count else part.mean) for index, part in bins]

    def _double(self) -> None:
        # bins are aligned to multiples of a power of two, so a bin depends only on its values and not on when they came:
        # appending keeps earlier bins, and reading a run in one go or step by step gives the same series
        merged: dict[int, Bin] = {}
        for index, part in sorted(self.bins.items()):
            merged[index // 2] = merged[index // 2].merged(part) if index // 2 in merged else part
        self.bins, self.width = merged, self.width * 2


def smoothed(points: list[Point], factor: float = 0.8) -> list[Point]:
    """Return an exponential moving average; gaps stay. `factor`: 0 is raw, below 1."""
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
    phases: dict[str, int] = field(default_factory=dict)
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
                self._add_phase("train", event)
            case events.Phase():
                self._add_phase(event.phase, event)
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
                self.peaks, self.phases = {}, {}
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

    def _add_phase(self, phase: str, memory: events.Memory) -> None:
        if memory.peak_allocated_bytes is not None:
            self.phases[phase] = max(self.phases.get(phase, 0), memory.peak_allocated_bytes)

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
    """One followed run."""

    def __init__(self, run: RunDirectory) -> None:
        self.run, self.digest, self._name = run, Digest(), secrets.token_hex(4)
        self._reader, self._is_read = events.EventReader(run.events), False
        #: Held while events are added, and by readers of several bins that belong together.
        self.lock = threading.Lock()
        self._file: tuple[int, int] | None = None
        self._plan: tuple[tuple[int, ...], Plan] | None = None

    @property
    def key(self) -> str:
        """Key that changes when values of earlier steps may change."""
        return f"{self._name}-{self.digest.attempts}"

    def refresh(self, limit_s: float = 0.5) -> bool:
        """Read new events, until `limit_s` seconds have passed; return whether all are read."""
        deadline_s = time.monotonic() + limit_s
        with self.lock:
            self._restart_if_replaced()
            while True:
                before = self._reader.offset
                for event in self._reader.new(_PIECE_BYTES):
                    self.digest.add(event)
                self._is_read = self._reader.offset == before
                if self._is_read or time.monotonic() > deadline_s:
                    return self._is_read

    @property
    def progress(self) -> float:
        """Return the share of the events that are read."""
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
        # during a long history the digest is old: read the end of the file
        return read_state(self.run, list(self.digest.newest.values()) if self._is_read else None)

    def _restart_if_replaced(self) -> None:
        try:
            stat = self.run.events.stat()
        except FileNotFoundError:
            return
        identity = (stat.st_dev, stat.st_ino)
        # another file, or a shorter one: read from the beginning
        if self._file is not None and (identity != self._file or stat.st_size < self._reader.offset):
            self._reader.offset, self.digest, self._name = 0, Digest(), secrets.token_hex(4)
        self._file = identity


class LiveRuns(dict[Path, LiveRun]):
    """Followed runs by path: one reader per run, however many tabs are open."""

    def of(self, run: RunDirectory) -> LiveRun:
        return self.get(run.path) or self.setdefault(run.path, LiveRun(run))
