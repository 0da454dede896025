"""`finetune runs show --memory`: peak memory by phase."""

from __future__ import annotations

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import out, show_progress, table
from finetune.errors import RecipeError
from finetune.events import Event, ForecastCheck, OutOfMemory, Phase, Step, event_json, newest, read_events
from finetune.memory.forecast import PhaseForecast
from finetune.run.directory import open_run
from finetune.run.out_of_memory import explanation_lines
from finetune.run.retry import adjusted_plan, adjusted_since_s
from finetune.run.snapshot import request_history
from finetune.run.state import is_alive
from finetune.units import format_bytes, format_measured

#: Seconds for a living run to end its step.
_DEADLINE_S = 120.0
_MEASURES = (
    "peak_allocated_bytes", "peak_reserved_bytes", "peak_segments", "card_used_bytes", "process_peak_rss_bytes",
)  # fmt: skip


def show_memory(source: str, *, as_json: bool) -> None:
    """Print peaks, and files for PyTorch's memory viewer."""
    run = open_run(source)
    try:
        plan = adjusted_plan(run)
    except RecipeError:  # a damaged plan: what was measured is shown anyway
        plan = None
    late = False
    if plan and plan.settings.record_memory_history and not plan.card.is_cpu and is_alive(run):
        with show_progress(quiet=as_json) as progress:  # a living run writes its history after its step
            late = not request_history(run, _DEADLINE_S, progress)
    events = read_events(run.events)
    peaks = _peaks(events, adjusted_since_s(run))
    checks = {event.at: event for event in events if isinstance(event, ForecastCheck)}  # the last of each
    planned = plan.forecast if plan else None
    forecasts = {phase: planned.of_phase(phase) if planned else PhaseForecast() for phase in peaks}
    failure = newest(OutOfMemory, events)
    histories = {moment: str(path) for moment, path in run.snapshots.items()}
    if as_json:
        first, end = (event_json(check) if check else None for check in (checks.get("first steps"), checks.get("end")))
        print_json({
            "run": str(run.path), "peaks": peaks, "forecast_peaks": {phase: vars(peak) for phase, peak in forecasts.items()},
            "forecast": first, "forecast_end": end, "history": next(reversed(histories.values()), None), "histories": histories,
            "out_of_memory": {**event_json(failure), "explanation": " ".join(explanation_lines(failure))} if failure else None,
        })  # fmt: skip
        return
    out.print(f"[bold]{escape(str(run.path))}[/]")
    shown = table("phase", ">allocated", ">reserved", ">segments", ">card", ">process")
    for phase, values in peaks.items():
        count = format_measured(values["peak_segments"], ",")
        shown.add_row(phase, *(count if name == "peak_segments" else format_bytes(values[name]) for name in _MEASURES))
        expected = forecasts[phase]
        if expected != PhaseForecast():
            sizes = ("" if size is None else format_bytes(size) for size in (expected.allocated_bytes, expected.reserved_bytes))
            shown.add_row("  forecast", *sizes, "" if expected.segments is None else f"{expected.segments:,}")
    out.print(shown)
    for check in checks.values():
        what, predicted, measured = "allocated", check.predicted_allocated_bytes, check.measured_allocated_bytes
        if measured is None:  # on a CPU
            what, predicted, measured = "for the process", check.predicted_peak_bytes, check.measured_peak_bytes
        error = f" ({measured / predicted - 1:+.1%})" if predicted and measured else ""
        out.print(f"{check.at}: forecast {format_bytes(predicted)} {what}, measured {format_bytes(measured)}{error}")
    if failure:
        out.print(f"out of memory: {escape(' '.join(explanation_lines(failure)))}")
    for moment, history in histories.items():
        out.print(f"allocator history, {moment}: {escape(history)}")
    if late:
        out.print(f"no step ended within {_DEADLINE_S:.0f} s; the run writes its history after this one")
    if histories:
        out.print("open a history at pytorch.org/memory_viz")
    elif not late:
        out.print("no allocator history; record_memory_history=true records one (on a card)")


def _peaks(events: list[Event], since_s: float) -> dict[str, dict[str, int | None]]:
    peaks: dict[str, dict[str, int | None]] = {}
    for event in events:
        phase = "train" if isinstance(event, Step) else event.phase if isinstance(event, (Phase, OutOfMemory)) else None
        # a retry changed the plan: earlier peaks belong to another forecast
        if phase is None or (event.time_s or 0) < since_s:
            continue
        measured = peaks.setdefault(phase, dict.fromkeys(_MEASURES))
        for name in _MEASURES:
            if (value := getattr(event, name)) is not None:
                measured[name] = max(value, measured[name] or 0)
    return peaks
