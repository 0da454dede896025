"""`finetune snapshot`: a run's memory."""

from __future__ import annotations

from rich.markup import escape

from finetune.cli.app import print_json
from finetune.cli.render import out, table
from finetune.events import Event, ForecastCheck, OutOfMemory, Phase, Step, event_json, read_events
from finetune.run.directory import open_run
from finetune.units import format_bytes

_MEASURES = ("peak_allocated_bytes", "peak_reserved_bytes", "card_used_bytes", "process_peak_rss_bytes")


def show_snapshot(source: str, *, as_json: bool) -> None:
    """Print peaks by phase, forecast and measured peak, and the path of the allocator history for PyTorch's viewer."""
    run = open_run(source)
    events = read_events(run.events)
    peaks = _peaks(events)
    checks = {event.at: event for event in events if isinstance(event, ForecastCheck)}  # the last of each
    history = str(run.snapshot) if run.snapshot.exists() else None
    if as_json:
        early = checks.get("first steps") or checks.get("first step")  # of an earlier version
        first, end = (event_json(check) if check else None for check in (early, checks.get("end")))
        print_json({"run": str(run.path), "peaks": peaks, "forecast": first, "forecast_end": end, "history": history})
        return
    out.print(f"[bold]{escape(str(run.path))}[/]")
    shown = table("phase", ">allocated", ">reserved", ">card", ">process")
    for phase, values in peaks.items():
        shown.add_row(phase, *(format_bytes(values[name]) for name in _MEASURES))
    out.print(shown)
    for check in checks.values():
        predicted, measured = format_bytes(check.predicted_allocated_bytes), format_bytes(check.measured_allocated_bytes)
        error = f" ({check.allocated_error:+.1%})" if check.allocated_error is not None else ""
        out.print(f"{check.at}: forecast {predicted} allocated, measured {measured}{error}")
    if history:
        out.print(f"allocator history: {escape(history)}; open it at pytorch.org/memory_viz")
    else:
        out.print("no allocator history; record_memory_history=true records one (on a card)")


def _peaks(events: list[Event]) -> dict[str, dict[str, int | None]]:
    """Largest value of each measure by phase; None where the machine doesn't measure it."""
    peaks: dict[str, dict[str, int | None]] = {}
    for event in events:
        if not isinstance(event, (Step, Phase, OutOfMemory)):
            continue
        phase = "train" if isinstance(event, Step) else event.phase
        if phase is None:
            continue
        known = peaks.setdefault(phase, dict.fromkeys(_MEASURES))
        for name in _MEASURES:
            value = getattr(event, name)
            if value is not None:
                known[name] = max(value, known[name] or 0)
    return peaks
