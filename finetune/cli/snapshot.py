"""`finetune snapshot`: a run's memory."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from finetune.cli.app import print_json
from finetune.cli.render import out, table
from finetune.events import read_events
from finetune.run.directory import open_run
from finetune.units import format_bytes

_MEASURES = ("peak_allocated_bytes", "peak_reserved_bytes", "card_used_bytes", "process_peak_rss_bytes")


def show_snapshot(source: str, *, as_json: bool) -> None:
    """Print peaks by phase, forecast and measured peak, and the path of the allocator history for PyTorch's viewer."""
    run = open_run(source)
    events = read_events(run.events)
    peaks = _peaks(events)
    forecast = next((event for event in reversed(events) if event["kind"] == "forecast"), None)
    history = str(run.snapshot) if run.snapshot.exists() else None
    if as_json:
        print_json({"run": str(run.path), "peaks": peaks, "forecast": forecast, "history": history})
        return
    out.print(f"[bold]{escape(str(run.path))}[/]")
    shown = table("phase", ">allocated", ">reserved", ">card", ">process")
    for phase, values in peaks.items():
        shown.add_row(phase, *(format_bytes(values[name]) for name in _MEASURES))
    out.print(shown)
    if forecast:
        predicted, measured = forecast["predicted_allocated_bytes"], forecast["measured_allocated_bytes"]
        error = f" ({forecast['allocated_error']:+.1%})" if forecast["allocated_error"] is not None else ""
        out.print(f"first step: forecast {format_bytes(predicted)} allocated, measured {format_bytes(measured)}{error}")
    if history:
        out.print(f"allocator history: {escape(history)}; open it at pytorch.org/memory_viz")
    else:
        out.print("no allocator history; record_memory_history=true records one (on a card)")


def _peaks(events: list[dict[str, Any]]) -> dict[str, dict[str, int | None]]:
    """Largest value of each measure by phase; None where the machine doesn't measure it."""
    peaks: dict[str, dict[str, int | None]] = {}
    for event in events:
        phase = (
            "train" if event["kind"] == "step" else event.get("phase") if event["kind"] in ("phase", "out_of_memory") else None
        )
        if phase is None:
            continue
        known = peaks.setdefault(phase, dict.fromkeys(_MEASURES))
        for name in _MEASURES:
            value = event.get(name)
            if value is not None:
                known[name] = max(value, known[name] or 0)
    return peaks
