"""State of a run from its events, updated by reading only what is new. Shared by every tab that shows the run."""

from __future__ import annotations

import math
import secrets
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune import events
from finetune.files import read_json, write_json
from finetune.planner.plan import Plan
from finetune.run.directory import RunDirectory
from finetune.run.pace import Pace
from finetune.run.state import RunState, read_state

from .views.series import Series
from .zoom import Chunks, finer, values_of

#: Read in one tick; what is more waits for the background reader, so that a tick stays short.
TICK_BYTES = 256 * 2**10
#: New bytes after which the digest is written to disk, so that the next start of the app need not read them again.
DIGEST_BYTES = 4 * 2**20
#: What the allocator's forecast by phase is compared with.
PHASE_PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_segments")
_MARKS, _SAMPLES, _MESSAGES = 400, 24, 50
#: Reads whose changes are remembered; a page that has an older version gets everything.
_VERSIONS = 600


@dataclass
class Digest:
    """The run so far: a series for each metric, marks for what happened when, the newest events of other kinds.

    `peaks` has the highest of each memory measure over all steps since the last retry, `phases` the allocator's by phase.
    """

    series: dict[str, Series] = field(default_factory=dict)
    marks: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MARKS))
    samples: deque[events.Sample] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    messages: deque[events.Event] = field(default_factory=lambda: deque(maxlen=_MESSAGES))
    peaks: dict[str, int] = field(default_factory=dict)
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    newest: dict[str, events.Event] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    #: The steps whose values or marks are new since `LiveRun` last looked: nothing else has changed.
    new_from: float = math.inf
    new_to: float = -math.inf

    @property
    def newest_step(self) -> events.Step | None:
        """The newest step; None before the first."""
        newest = self.newest.get(events.Step.kind)
        return newest if isinstance(newest, events.Step) else None

    @property
    def step(self) -> int:
        """Its number, 0 before the first."""
        return self.newest_step.step if self.newest_step else 0

    def add(self, event: events.Event) -> None:
        """Add one event; kinds that are not known are left out."""
        if isinstance(event, events.Unknown):
            return
        self.newest[event.kind] = event
        self.pace.add(event)
        match event:
            case events.Step():
                self._add_step(event)
                self._add_phase("train", event)
            case events.Phase():
                self._add_phase(event.phase, event)
            case events.Evaluation():
                self._add("eval_loss", event.step, event.eval_loss)
                for name, value in event.metrics.items():
                    self._add(f"eval/{name}", event.step, value)
                self._mark("evaluation", event.step)
            case events.Checkpoint():
                self._mark("save", event.step)
            case events.Retry():
                self._mark("retry", self.step)
                self.peaks, self.phases = {}, {}
            case events.Start():
                self._mark("resume" if event.resumed_from else "start", event.step or self.step)
            case events.Sample():
                self.samples.append(event)
        if isinstance(event, (events.RunWarning, events.Retry, events.OutOfMemory, events.State, events.Start)):
            self.messages.append(event)

    def _add_phase(self, phase: str, memory: events.Memory) -> None:
        for name in PHASE_PEAKS:
            value = getattr(memory, name)
            if value is not None:
                peaks = self.phases.setdefault(phase, {})
                peaks[name] = max(peaks.get(name, 0), value)

    def _add_step(self, event: events.Step) -> None:
        if "loss" not in self.series:
            self._mark("first step", event.step)
        for name, value in values_of(event).items():
            self._add(name, event.step, value)
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "card_used_bytes", "process_peak_rss_bytes"):
            value = getattr(event, name)
            if value is not None:
                self.peaks[name] = max(self.peaks.get(name, 0), value)

    def _add(self, name: str, step: int, value: float | None) -> None:
        self.series.setdefault(name, Series()).add(step, value)
        self.new_from, self.new_to = min(self.new_from, step), max(self.new_to, step)

    def _mark(self, name: str, step: int) -> None:
        self.marks.append({"name": name, "step": step})
        self.new_from, self.new_to = min(self.new_from, step), max(self.new_to, step)

    def as_json(self) -> dict[str, Any]:
        return {
            "series": {name: series.as_json() for name, series in self.series.items()}, "marks": list(self.marks),
            "samples": [events.event_json(event) for event in self.samples], "peaks": self.peaks, "phases": self.phases,
            "messages": [events.event_json(event) for event in self.messages],
            "newest": {kind: events.event_json(event) for kind, event in self.newest.items()},
            "pace": self.pace.as_json(),
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Digest:
        digest = cls({name: Series.from_json(series) for name, series in values["series"].items()})
        digest.marks.extend(values["marks"])
        digest.samples.extend(event for event in map(events.event_from, values["samples"]) if isinstance(event, events.Sample))
        digest.messages.extend(map(events.event_from, values["messages"]))
        digest.peaks, digest.phases = values["peaks"], values["phases"]
        digest.newest = {kind: events.event_from(event) for kind, event in values["newest"].items()}
        digest.pace = Pace.from_json(values["pace"], sorted(digest.newest.values(), key=lambda event: event.time_s or 0.0))
        return digest


class LiveRun:
    """One run, followed. `refresh` is what a tick calls; it costs what is new, and never more than TICK_BYTES."""

    def __init__(self, run: RunDirectory, digest_path: Path) -> None:
        self.run, self._digest_path = run, digest_path
        self.digest, self.version = Digest(), 0
        self._reader = events.EventReader(run.events)
        #: Held while events are taken in; by who reads several bins that belong together, too.
        self.lock, self._catching_up = threading.Lock(), False
        self._file: tuple[int, int] | None = None
        self._saved_offset = 0
        self._plan: tuple[tuple[int, ...], Plan] | None = None
        #: Name of this follower and its digest; bins of another one are no earlier version of its bins.
        self.name = secrets.token_hex(4)
        self._changes: deque[tuple[int, float]] = deque(maxlen=_VERSIONS)
        self._chunks = Chunks()

    def refresh(self) -> bool:
        """Read what is new. True when everything is read; False while a long history is still being read in the background."""
        with self.lock:
            self._restart_if_replaced()
            behind = self._size() - self._reader.offset
            if self._catching_up:
                return False
            if behind > TICK_BYTES:
                self._catching_up = True
                threading.Thread(target=self._catch_up, daemon=True).start()
                return False
            self._read(TICK_BYTES)
            return True

    @property
    def progress(self) -> float:
        """Share of the events that has been read."""
        return self._reader.offset / max(1, self._size())

    def changed_from(self, version: int) -> float:
        """The lowest step with values that are newer than `version`: infinite for none, 0 when that is not remembered."""
        if version == self.version:
            return math.inf
        newer = [step for number, step in list(self._changes) if number > version]
        return min(newer) if len(newer) == self.version - version else 0.0

    def finer(self, start: int, stop: int, most_bins: int) -> dict[str, Series] | None:
        """The metrics of a range of steps in bins of their own; None where the range is too wide for that."""
        return finer(self.run.events, self._chunks.of(start, stop, self._reader.offset), start, stop, most_bins)

    def plan(self) -> Plan:
        """The run's plan with the changes of its retries, read again when a file changed."""
        changes = [path for path in (self.run.adjustments, self.run.adjusted_forecast) if path.exists()]
        stamp = tuple(path.stat().st_mtime_ns for path in (self.run.plan, *changes))
        if self._plan is None or self._plan[0] != stamp:
            from finetune.run.retry import adjusted_plan

            self._plan = (stamp, adjusted_plan(self.run))
        return self._plan[1]

    def state(self) -> RunState:
        """The state as its events and processes say now."""
        return read_state(self.run, None if self._catching_up else list(self.digest.newest.values()))

    def wait(self) -> None:
        """Read everything there is now, however much: for pages that compare runs, and tests."""
        while True:
            with self.lock:
                self._restart_if_replaced()
                if not self._read(2**20):
                    return

    def _catch_up(self) -> None:
        """Read a long history in pieces, letting ticks in between."""
        while True:
            with self.lock:
                if not self._read(2**20) or self._size() - self._reader.offset <= TICK_BYTES:
                    self._catching_up = False
                    self._save_digest()
                    return

    def _read(self, most_bytes: int) -> bool:
        before = self._reader.offset
        for event in self._reader.new(most_bytes):
            self.digest.add(event)
        if self._reader.offset != before:
            self.version += 1
            self._note_changes(before)
            if self._reader.offset - self._saved_offset > DIGEST_BYTES:
                self._save_digest()
        return self._reader.offset != before

    def _note_changes(self, offset: int) -> None:
        """Which steps the events from `offset` on changed."""
        digest = self.digest
        self._changes.append((self.version, digest.new_from))
        if digest.new_to >= digest.new_from:
            self._chunks.add(offset, int(digest.new_from), int(digest.new_to))
        digest.new_from, digest.new_to = math.inf, -math.inf

    def _size(self) -> int:
        try:
            return self.run.events.stat().st_size
        except FileNotFoundError:
            return 0

    def _restart_if_replaced(self) -> None:
        """A file that is another one, or shorter than what was read, is read from its beginning."""
        try:
            stat = self.run.events.stat()
        except FileNotFoundError:
            return
        identity = (stat.st_dev, stat.st_ino)
        if self._file is None:
            self._file = identity
            self._restore_digest()
        if identity != self._file or stat.st_size < self._reader.offset:
            self._file, self._reader.offset, self._saved_offset = identity, 0, 0
            self.digest, self.version = Digest(), self.version + 1
            self.name, self._chunks = secrets.token_hex(4), Chunks()

    def _save_digest(self) -> None:
        if self._reader.offset - self._saved_offset < DIGEST_BYTES:
            return
        self._saved_offset = self._reader.offset
        saved = {"file": self._file, "offset": self._saved_offset, "digest": self.digest.as_json(), "chunks": self._chunks.rows}
        write_json(self._digest_path, saved, checksum=True)

    def _restore_digest(self) -> None:
        try:
            values = read_json(self._digest_path)
            if values["file"] != list(self._file or ()) or values["offset"] > self._size():
                return
            self.digest = Digest.from_json(values["digest"])
            self._chunks = Chunks(values["chunks"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # none yet, or of another version: the events are there
            return
        self._reader.offset = self._saved_offset = values["offset"]


class LiveRuns:
    """The followed runs by path: one reader for each, however many tabs look."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._runs: dict[Path, LiveRun] = {}

    def of(self, run: RunDirectory) -> LiveRun:
        """The one follower of this run."""
        with self._lock:
            if run.path not in self._runs:
                self._runs[run.path] = LiveRun(run, self._folder / f"{run.path.name}.json")
            return self._runs[run.path]

    def forget(self, run: RunDirectory) -> None:
        """The run was moved or renamed."""
        with self._lock:
            self._runs.pop(run.path, None)
