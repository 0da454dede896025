"""The results file, a JSON line per finished cell, and the figures of a run's events."""

from __future__ import annotations

import json
import os
import statistics
import threading
from pathlib import Path
from typing import Any

from finetune.events import Event, OutOfMemory, Phase, Start, State, Step
from finetune.serialise import to_json

#: Steps that don't count for speed: libraries load kernels in them.
WARM_UP_STEPS = 2


class Results:
    """Appends to a file; each line has the facts that all cells of one call share."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self._path, self.facts, self._lock = path, facts, threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, cell: str, **values: Any) -> None:
        """Write a line to the disk and print it, shortened."""
        line = {**self.facts, "cell": cell, **values}
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_json(line)) + "\n")
            file.flush()
            os.fsync(file.fileno())
            print(f"{cell:<16} {_short(values)}", flush=True)


def _short(values: dict[str, Any]) -> str:
    forecast, measured = values.get("forecast") or {}, values.get("measured") or {}
    predicted, actual = forecast.get("allocated_bytes"), measured.get("allocated_bytes")
    parts = [
        str(values.get("state") or ""),
        f"{predicted / 2**30:.3f} GiB forecast, {actual / 2**30:.3f} measured ({predicted / actual - 1:+.2%})"
        if predicted and actual
        else "",
        f"{measured['tokens_per_s']:,.0f} tokens/s" if measured.get("tokens_per_s") else "",
        str(values.get("error") or "")[:200],
    ]
    return "  ".join(part for part in parts if part)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a results file; none without a file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def of_events(events: list[Event]) -> dict[str, Any]:
    """Return state, error, peaks over all steps, peaks of the other phases, and speed without the first steps."""
    steps = [event for event in events if isinstance(event, Step)]
    last = next((event for event in reversed(events) if isinstance(event, State)), None)
    short = next((event for event in reversed(events) if isinstance(event, OutOfMemory)), None)
    state = "out of memory" if short else last.state if last else None
    fields = ("peak_allocated_bytes", "peak_reserved_bytes", "card_used_bytes", "process_peak_rss_bytes")
    phases = {
        event.phase: {name: getattr(event, name) for name in fields} | {"phase_s": event.phase_s}
        for event in events
        if isinstance(event, Phase)
    }
    start = next((event for event in events if isinstance(event, Start)), None)
    return {
        "state": state, "error": short.message if short else None if state == "finished" else last and last.message,
        "phases": phases, "exact": start and start.exact, "losses": [step.loss for step in steps],
        "measured": {
            "allocated_bytes": _highest(step.peak_allocated_bytes for step in steps),
            "reserved_bytes": _highest(step.peak_reserved_bytes for step in steps),
            "rss_bytes": _highest(step.process_peak_rss_bytes for step in steps),
            **speed([step.step_s for step in steps], [step.real_tokens for step in steps]),
        },
    }  # fmt: skip


def speed(step_s: list[float | None], tokens: list[int | None]) -> dict[str, float | None]:
    """Median seconds of a step, and tokens per second, without the first steps."""
    later = [(s, count) for s, count in zip(step_s, tokens, strict=True) if s and count][WARM_UP_STEPS:]
    if not later:
        return {"step_s": None, "tokens_per_s": None}
    return {
        "step_s": statistics.median(s for s, _ in later),
        "tokens_per_s": sum(count for _, count in later) / sum(s for s, _ in later),
    }


def _highest(values: Any) -> int | None:
    return max((value for value in values if value is not None), default=None)
