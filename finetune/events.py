"""Events: one JSON line each, the only channel between a run and those who watch it.

One writer at a time, append-only, whole lines; a reader keeps a byte offset and tolerates a torn last line and kinds it doesn't
know. Numbers carry their unit in the name; unknown is null. Every event has `kind` and `time_s` (seconds since 1970).

    state         state, attempt, message, exit_code          one of the run's states, see finetune.run.state
    phase         phase, and memory                           load, first_step, train, evaluate, save: what begins now
    start         exact, reason, total_steps, versions, ...   how this attempt begins, from which checkpoint
    step          step, loss, learning_rate, grad_norm, tokens, seconds, memory
    eval          step, eval_loss, eval_s
    checkpoint    step, path, bytes, save_s, seal_s
    forecast      predicted and measured bytes after the first step, and at the end
    sample        step, prompt, expected, answer
    warning       message
    retry         attempt, reason, changes                    what the next attempt does differently, and why there is one
    out_of_memory phase, message, asked_bytes, memory         where it ran out, before a retry or the end
    loss_spike    message, learning_rate                      the opt-in watchdog ended an attempt
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class EventWriter:
    """Appends events to a file. Each line is one write(), so that readers never see half of one from a living writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listeners: list[Callable[[str, dict[str, Any]], None]] = []  # hear each event after it is written
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._torn = self._ends_torn()  # a writer that died inside a line left no newline; ours must not continue its line

    def _ends_torn(self) -> bool:
        size = os.fstat(self._file).st_size
        if not size:
            return False
        with self.path.open("rb") as file:
            file.seek(size - 1)
            return file.read(1) != b"\n"

    def emit(self, kind: str, **values: Any) -> None:
        """Write one event. `state` events are synced to disk; raises OSError when the disk is full."""
        line = json.dumps(_finite({"kind": kind, "time_s": round(time.time(), 3), **values}), allow_nan=False) + "\n"
        data = line.encode()
        if self._torn:
            data = b"\n" + data
        written = os.write(self._file, data)
        if written != len(data):
            self._torn = self._torn or written > 0
            raise OSError(errno.ENOSPC, "the disk is full", str(self.path))
        self._torn = False
        if kind in ("state", "retry", "checkpoint"):
            os.fsync(self._file)
        for hear in self.listeners:
            hear(kind, values)

    def close(self) -> None:
        """Close the file; the writer can't be used afterwards."""
        os.close(self._file)


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they are written as text, so that nobody takes them for numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value


class EventReader:
    """Reads events that are new since the last call. `offset` is in bytes and can be kept to go on later."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def new(self, most_bytes: int = 64 * 2**20) -> list[dict[str, Any]]:
        """Events appended since the last call, from at most `most_bytes`; broken lines are left out."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(most_bytes)
        except (FileNotFoundError, IsADirectoryError):
            return []
        whole = data.rfind(b"\n") + 1
        self.offset += whole
        return list(_parsed(data[:whole]))


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of a file."""
    reader, events = EventReader(path), []
    while new := reader.new():
        events += new
    return events


def _parsed(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # a torn line of a writer that died; the next writer went on behind it
            continue
        if isinstance(event, dict) and isinstance(event.get("kind"), str):
            yield event
