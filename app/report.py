"""Reports as HTML files that open offline: `python -m app.report FILE PATH ...`"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.evaluate.results import difference, format_difference, read_evaluations
from finetune.evaluate.scorers import score_range
from finetune.events import ForecastCheck, Start, read_events
from finetune.files import changes_in, read_object, write_output
from finetune.planner.history import cost_of, seconds_spent
from finetune.planner.plan import plan_was_edited
from finetune.run.base_adapter import base_adapter_of
from finetune.run.directory import RunDirectory, open_run
from finetune.run.memory import outcome

from .live import LiveRun
from .views.answers import answers, evaluations
from .views.charts import curves, measured_peak
from .views.markup import Safe, render
from .views.new_run import verdict as plan_verdict
from .views.run import BROKEN, about, explanation_of, figures, memory, messages, pill, progress, settings_table
from .views.runs import arm_name, arms, comparison, losses
from .workspace import JOURNAL

_ROWS_SHOWN = 5


def main() -> int:
    """Write the report; return the exit status."""
    target, paths = Path(sys.argv[1]), sys.argv[2:]
    try:
        is_sweep = (Path(paths[0]) / JOURNAL).is_file()
        write_output(target, _sweep_report(Path(paths[0])) if is_sweep else runs_report([open_run(path) for path in paths]))
    except FinetuneError as error:
        sys.stderr.write(json.dumps(error.as_json()) + "\n")
        return error.exit_code
    return 0


def runs_report(runs: list[RunDirectory]) -> str:
    """Return the report of a run, or a comparison."""
    lives = list(map(LiveRun, runs))
    for live in lives:
        live.refresh(math.inf)
    if len(lives) == 1:
        return _run_report(lives[0])
    title = ", ".join(run.path.name for run in runs)
    return _render_report(
        "report_runs", title, lives=lives, measured_peak=measured_peak, compared=comparison(lives),
        pairs=_paired_differences(runs),
    )  # fmt: skip


def _sweep_report(path: Path) -> str:
    from finetune.sweep import RULE, open_sweep

    sweep = open_sweep(path)
    return _render_report(
        "report_sweep", path.name, rule=RULE, sentence=sweep.sentence(arm_name), losses=Safe(losses(sweep)),
        arms=arms(sweep, in_report=True),
    )  # fmt: skip


def _render_report(template: str, title: str, **values: Any) -> str:
    # inline: the file must open offline
    names = ("theme.css", "svg_chart.css", "run.css", "new_run.css")
    style = "".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in names)
    written = time.strftime("%Y-%m-%d %H:%M")
    return render(template, title=title, style=style, written=written, pill=pill, **values) + "\n"


def _run_report(live: LiveRun) -> str:
    run, plan, digest, state = live.run, live.plan(), live.digest, live.state()
    events, start = read_events(run.events), digest.newest.get(Start.kind)
    failure = explanation_of(live, state) if state.state in BROKEN else ""
    not_evaluated = f"Not evaluated yet: finetune eval {run.path.name}"
    return _render_report(
        "report_run", run.path.name, about=about(live), run=run, plan=plan, state=state,
        outcome=outcome(events)[0] if state.state == "finished" else "", progress=progress(live, state),
        figures=Safe(failure + figures(digest, plan)),
        cost=cost_of(seconds_spent(events), plan.settings.price_per_hour), origin=base_adapter_of(run),
        scores=evaluations(run, rows_shown=_ROWS_SHOWN, is_open=True, empty=not_evaluated),
        # without images: a foreign run folder may name any image of this machine, and a report is passed on
        answers=Safe(answers(digest.samples, with_pictures=False)), curves=Safe(curves(live)), memory=memory(digest, plan),
        checks=[event for event in events if isinstance(event, ForecastCheck) and event.measured_allocated_bytes],
        # a changed report.json must not be shown as fact
        data_changes=changes_in(run.data, required=False, only="report.json"), data=read_object(run.data / "report.json"),
        was_edited=plan_was_edited(run.plan), verdict=Safe(plan_verdict(plan, has_bar=False)), chosen=settings_table(plan),
        messages=messages(digest), versions=sorted(start.versions.items()) if isinstance(start, Start) else (),
    )  # fmt: skip


def _paired_differences(runs: list[RunDirectory]) -> list[tuple[str, str]]:
    # name of a score, and the difference of two runs' tuned models on the same rows
    results = {run.path.name: read_evaluations(run) for run in runs}
    rows = []
    for first_name, second_name in itertools.combinations(results, 2):
        label = f"{second_name} - {first_name}"
        for score in results[first_name].keys() & results[second_name].keys():
            first, second = results[first_name][score], results[second_name][score]
            if any(first[key] != second[key] for key in ("prompts", "references")):
                continue
            first, second = first["tuned"], second["tuned"]
            if len(first["scores"]) > 1:
                span = score_range(score, first["scores"], second["scores"])
                gap = difference(first["scores"], second["scores"], span=span)
                rows.append((score, f"{label}: {format_difference(gap)}"))
            tokens = first["row_tokens"]
            # losses per row compare only with the same trained tokens
            if tokens == second["row_tokens"] and len(tokens) > 1 and any(tokens):
                gap = difference(first["row_losses"], second["row_losses"], tokens)
                rows.append((f"{score}: loss", f"{label}: {format_difference(gap)}"))
    return sorted(rows)


if __name__ == "__main__":
    sys.exit(main())
