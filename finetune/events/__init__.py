"""Events: one JSON line each, the only channel from a run to the terminal, the page and the trackers.

One writer at a time, append-only, complete lines. A reader keeps a byte offset and tolerates an incomplete last line, unknown
kinds and keys, and missing keys. docs/events.md documents every kind.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune.checksum import is_damaged, with_checksum
from finetune.events.kinds import (
    ENDED_STATES,
    KINDS,
    VERSION,
    Checkpoint,
    Compiled,
    Evaluation,
    Event,
    ForecastCheck,
    LossSpike,
    Memory,
    OutOfMemory,
    Phase,
    Result,
    Retry,
    RunWarning,
    Sample,
    Start,
    State,
    Step,
    Unknown,
)
from finetune.serialise import from_json, readable, to_json
from finetune.system import one_writer_at_a_time

__all__ = [
    "ENDED_STATES", "KINDS", "VERSION", "Checkpoint", "Compiled", "Evaluation", "Event", "EventReader", "EventWriter",
    "ForecastCheck", "LossSpike", "Memory", "OutOfMemory", "Phase", "Result", "Retry", "RunWarning", "Sample", "Start",
    "State", "Step", "Unknown", "event_from", "event_json", "read_events",
]  # fmt: skip

_Kinds = Mapping[str, type[Event]]


class EventWriter:
    """Appends events to a file. Each line is one write(), so that readers see only complete lines of a live writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listeners: list[Callable[[Event], None]] = []  # called with each event after it is written
        self._file = path.open("ab", buffering=0)
        self._write_lock = one_writer_at_a_time(path)
        self._is_incomplete = self._ends_incomplete()  # a killed writer's incomplete line must not be continued

    def _ends_incomplete(self) -> bool:
        size = os.fstat(self._file.fileno()).st_size
        if not size:
            return False
        with self.path.open("rb") as file:
            file.seek(size - 1)
            return file.read(1) != b"\n"

    def emit(self, event: Event) -> None:
        """Write one event, with the time. Raises OSError when the disk is full."""
        event = dataclasses.replace(event, time_s=round(time.time(), 3))
        line = with_checksum(json.dumps(event_json(event), allow_nan=False)).encode() + b"\n"
        if self._is_incomplete:
            line = b"\n" + line
        with self._write_lock:
            written = self._file.write(line)
        if written != len(line):
            self._is_incomplete = self._is_incomplete or written > 0
            raise OSError(errno.ENOSPC, "the disk is full", str(self.path))
        self._is_incomplete = False
        if event.durable:
            os.fsync(self._file.fileno())
        for listener in self.listeners:
            listener(event)

    def close(self) -> None:
        """Close the file; the writer can't be used afterwards."""
        self._file.close()


class EventReader:
    """Reads the events appended since the last call. `offset` is in bytes; store it to continue later."""

    def __init__(self, path: Path, offset: int = 0, kinds: _Kinds = KINDS) -> None:
        self.path, self.offset, self._kinds = path, offset, kinds

    def new(self, max_bytes: int = 64 * 2**20) -> list[Event]:
        """Events appended since the last call, from at most `max_bytes`; incomplete lines are skipped, a changed one warns."""
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # a FIFO would wait for a writer
                return []
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(max_bytes)
        except FileNotFoundError:
            return []
        complete_bytes = data.rfind(b"\n") + 1
        self.offset += complete_bytes
        events = (_event_of(line, self._kinds) for line in data[:complete_bytes].splitlines())
        return [event for event in events if event is not None]


def read_events(path: Path, kinds: _Kinds = KINDS) -> list[Event]:
    """All events of a file."""
    reader, events = EventReader(path, kinds=kinds), list[Event]()
    while new := reader.new():
        events += new
    return events


def event_json(event: Event) -> dict[str, Any]:
    """An event as the JSON object of its line."""
    if isinstance(event, Unknown):
        return event.values
    kind: Any = type(event)
    return {"kind": event.kind, **{name: to_json(getattr(event, name)) for name in _field_order(kind)}}


def event_from(values: dict[str, Any], kinds: _Kinds = KINDS) -> Event:
    """The event of a JSON object from `event_json`. Raises ValueError for a value of the wrong type."""
    kind = kinds.get(values["kind"])
    return Unknown(values=values) if kind is None else from_json(kind, values)


@functools.cache
def _field_order(kind: Any) -> tuple[str, ...]:
    """Fields in the order in which they are written: the time, the kind's own, the shared memory fields."""
    names = [field.name for field in dataclasses.fields(kind)]
    return tuple(sorted(names, key=lambda name: 0 if name == "time_s" else 1 if name in kind.__annotations__ else 2))


_DAMAGED = "a line of events.jsonl has changed since it was written, and is left out"
#: The writer puts the kind first, so that a line is parsed only once.
_KIND = re.compile(rb'\{"kind": "(\w+)"')


def _event_of(line: bytes, kinds: _Kinds) -> Event | None:
    """The event of a line; a warning for one with another checksum, None for an incomplete line and for anything else."""
    if is_damaged(line):
        return RunWarning(message=_DAMAGED) if RunWarning.kind in kinds else None
    match = _KIND.match(line)
    kind = kinds.get(match[1].decode()) if match else None
    if kind is not None:
        return readable(kind, line)
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
        return None
    kind = kinds.get(values["kind"])
    return readable(kind, line) if kind is not None else Unknown(values=values)
