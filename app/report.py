"""Reports as HTML files that open offline: `python -m app.report FILE PATH ...`"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.evaluate.paired import difference, format_difference
from finetune.evaluate.results import read_evaluations, read_forgetting, read_no_call, read_tasks, unreadable_evaluations
from finetune.evaluate.scorers import span_of
from finetune.events import ForecastCheck, Start, read_events
from finetune.files import read_object, write_output
from finetune.manifest import changes_in
from finetune.planner.history import cost_of, seconds_spent
from finetune.planner.plan import plan_was_edited
from finetune.run.accuracy import outcome
from finetune.run.base_adapter import base_adapter_of
from finetune.run.directory import RunDirectory, open_run
from finetune.units import format_bytes

from .live import LiveRun
from .views import new_run as plan_head
from .views import run as run_view
from .views import run_figures, run_page
from .views.answers import answers
from .views.choices import chosen
from .views.markup import as_on_page, inert, note, render, table
from .views.runs import comparison
from .views.scores import forgetting_notes, no_call_note, scores, task_table
from .workspace import JOURNAL

_ROWS_SHOWN = 5
#: Forecast and measured memory: suffix of the field, and its name.
_COMPARED = {
    "allocated_bytes": "allocated", "reserved_bytes": "reserved", "context_bytes": "CUDA context",
    "other_processes_bytes": "other programs", "card_used_bytes": "whole GPU, with other programs",
}  # fmt: skip


def main() -> int:
    """Write the file; return the exit status."""
    target, names = Path(sys.argv[1]), sys.argv[2:]
    try:
        is_sweep = (Path(names[0]) / JOURNAL).is_file()
        write_output(target, sweep_page(Path(names[0])) if is_sweep else page([open_run(name) for name in names]))
    except FinetuneError as error:
        sys.stderr.write(json.dumps(error.as_json()) + "\n")
        return error.exit_code
    return 0


def page(runs: list[RunDirectory]) -> str:
    """Return the report of a run, or a comparison."""
    lives = list(map(LiveRun, runs))
    for live in lives:
        live.wait()
    title = ", ".join(run.path.name for run in runs)
    if len(lives) > 1:
        return _page(title, "", _several(lives))
    return _page(title, note(" · ".join(run_page.about(lives[0]))), _one(lives[0]))


def sweep_page(path: Path) -> str:
    """Return the page of a sweep."""
    from finetune.sweep.sweep import RULE, open_sweep

    from .views import sweep as sweep_view

    sweep = open_sweep(path)
    head = f"<p>{inert(sweep_view.sentence(sweep))}</p>{note(as_on_page(RULE))}"
    arms = sweep_view.arms_table(sweep.results(), lambda entry: inert(entry.run))
    return _page(sweep.path.name, head, {"Held-out loss": sweep_view.losses(sweep), "Arms": arms})


def _page(title: str, head: str, parts: dict[str, str]) -> str:
    # inline: the file must open offline
    names = ("theme.css", "svg_chart.css", "run.css", "new_run.css")
    style = "".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in names)
    return render("report", title=title, style=style, made=time.strftime("%Y-%m-%d %H:%M"), head=head, parts=parts) + "\n"


def _one(live: LiveRun) -> dict[str, str]:
    plan, digest = live.plan(), live.digest
    edited = note("plan.json has changed since it was written.") if plan_was_edited(live.run.plan) else ""
    origin = base_adapter_of(live.run)
    continued = note(f"Continued from the adapter of {origin.summary()}.") if origin else ""
    notes = "".join(map(note, plan.forecast.notes if plan.forecast else ()))
    measured = f"{run_view.curves(live)}{_checks(live)}{run_figures.memory(digest, plan)}"
    return {
        "How it went": _outcome(live) + continued,
        "Scores": _evaluations(live.run),
        # without images: a foreign run folder may name any image of this machine, and a report is passed on
        "Sample answers": answers(digest.samples, with_pictures=False),
        "Curves, and forecast against measured": measured,
        "Data": _data(live.run),
        "Plan": edited + f'<div id="new-run">{plan_head.answer(plan, has_bar=False)}</div>' + notes + chosen(plan),
        "Messages": run_view.messages(digest),
        "Versions": _versions(digest),
    }


def _several(lives: list[LiveRun]) -> dict[str, str]:
    rows = [
        [live.run.path.name, run_view.pill(live.state()), f"{live.digest.step:,}",
         format_bytes(run_view.measured_peak(live.digest, live.plan())[1])]
        for live in lives
    ]  # fmt: skip
    summary = table(["run", "state", ">steps", ">measured peak"], rows, "Runs", hidden_caption=True)
    return {"Runs": summary, "Curves and settings": comparison(lives), "Paired scores": _paired([live.run for live in lives])}


def _outcome(live: LiveRun) -> str:
    state, every = live.state(), read_events(live.run.events)
    is_broken = state.state in run_page.BROKEN
    shown = run_page.explanation_of(live, state) if is_broken else run_figures.figures(live.digest, live.plan())
    cost = cost_of(seconds_spent(every), live.plan().settings.price_per_hour)
    spent = "" if cost is None else note(f"Cost {cost:,.2f}.")
    result = "" if live.run.adapter.is_dir() else note("The run has no result yet.")
    result = note(f"Finished in {outcome(every)[0]} {state.message}.") if state.state == "finished" else result
    return f"<p>{run_view.pill(state)}</p>{result}{run_page.progress(live, state)}{shown}{spent}"


def _checks(live: LiveRun) -> str:
    checks = [event for event in read_events(live.run.events) if isinstance(event, ForecastCheck)]
    rows = [row for check in checks if check.measured_allocated_bytes for row in _compared(check)]
    columns = ["peak", "memory", ">forecast", ">measured", ">difference"]
    return table(columns, rows, "Forecast against measured", hidden_caption=True) if rows else ""


def _compared(check: ForecastCheck) -> Iterator[list[str]]:
    unknown = "unknown: the driver does not report it"
    # the whole GPU is known, so the driver works: only the list by process is missing
    if check.measured_card_used_bytes is not None:
        unknown = "unknown: the driver lists no memory by process, as on Windows, in WSL or a container"
    for field, name in _COMPARED.items():
        forecast, measured = getattr(check, f"predicted_{field}"), getattr(check, f"measured_{field}")
        if forecast is not None or measured is not None:
            difference = f"{measured / forecast - 1:+.1%}" if measured is not None and forecast else ""
            shown_forecast = "no forecast" if forecast is None else format_bytes(forecast)
            yield [check.at, name, shown_forecast, unknown if measured is None else format_bytes(measured), difference]


def _evaluations(run: RunDirectory) -> str:
    evaluations, tasks = read_evaluations(run), task_table(read_tasks(run))
    if damaged := unreadable_evaluations(run):
        tasks += note(damaged)
    if not evaluations and not tasks:
        return note(f"Not evaluated yet: finetune eval {run.path.name}")
    shown = "".join(f"<h3>{inert(name)}</h3>{scores(result, 'differ', _ROWS_SHOWN)}" for name, result in evaluations.items())
    return no_call_note(read_no_call(run)) + shown + tasks + forgetting_notes(read_forgetting(run))


def _paired(runs: list[RunDirectory]) -> str:
    evaluations, rows = {run.path.name: read_evaluations(run) for run in runs}, []
    for (run_name, of_run), (other_name, of_other) in itertools.combinations(evaluations.items(), 2):
        for name in of_run.keys() & of_other.keys():
            first, second = of_run[name], of_other[name]
            same_rows = all(first[key] == second[key] for key in ("prompts", "references"))
            if same_rows and len(first["tuned"]["scores"]) > 1:
                scores = first["tuned"]["scores"], second["tuned"]["scores"]
                rows.append([name, _gap_text(run_name, other_name, *scores, span_of(name, *scores))])
            tokens = first["tuned"]["row_tokens"]
            # losses per row compare only with the same trained tokens
            if same_rows and tokens == second["tuned"]["row_tokens"] and len(tokens) > 1 and any(tokens):
                losses = first["tuned"]["row_losses"], second["tuned"]["row_losses"]
                rows.append([f"{name}: loss", _gap_text(run_name, other_name, *losses, 0.0, tokens)])
    if not rows:
        return note("The runs were not scored on the same rows. Run finetune eval RUN for each, then compare again.")
    return table(["score", "difference of the tuned models"], sorted(rows), "Paired scores", hidden_caption=True)


def _gap_text(run_name: str, other_name: str, first: list[float], second: list[float], span: float, weights: Any = None) -> str:
    return f"{other_name} - {run_name}: {format_difference(difference(first, second, weights, span=span))}"


def _data(run: RunDirectory) -> str:
    path = run.data / "report.json"
    # a changed report.json must not be shown as fact
    if changes := changes_in(run.data, required=False, only=path.name):
        return note(f"The data report can't be trusted: {'; '.join(changes)}.")
    report = read_object(path)
    if report is None:
        return note("The run has no readable data report.")
    parts = (("training", report), ("held out", report.get("eval_report")))
    rows = [[name, _data_line(part)] for name, part in parts if part]
    return table(["rows", "contents"], rows, "Data", hidden_caption=True)


def _data_line(part: dict[str, Any]) -> str:
    files = ", ".join(map(str, part.get("files") or []))
    counts = f"{part.get('total_tokens', 0):,} tokens, {part.get('trained_tokens', 0):,} trained"
    return f"{part.get('account', 'not counted')}; {counts}; {files}"


def _versions(digest: Any) -> str:
    start = digest.newest.get(Start.kind)
    versions = start.versions if isinstance(start, Start) else {}
    rows = sorted(versions.items())
    return table(["package", "version"], rows, "Versions", hidden_caption=True) if rows else note("Unknown.")


if __name__ == "__main__":
    sys.exit(main())
