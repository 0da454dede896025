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
from finetune.evaluate.paired import difference, format_difference
from finetune.evaluate.results import read_evaluations
from finetune.evaluate.scorers import score_range
from finetune.events import ForecastCheck, Start, read_events
from finetune.files import read_object, write_output
from finetune.manifest import changes_in
from finetune.planner.history import cost_of, seconds_spent
from finetune.planner.plan import plan_was_edited
from finetune.run.accuracy import outcome
from finetune.run.base_adapter import base_adapter_of
from finetune.run.directory import RunDirectory, open_run

from .live import LiveRun
from .views.answers import answers, evaluations
from .views.charts import curves, measured_peak
from .views.markup import Safe, as_on_page, render
from .views.new_run import answer as plan_answer
from .views.run import BROKEN, about, explanation_of, figures, memory, messages, pill, progress, settings_table
from .views.runs import arms, comparison, losses, sweep_sentence
from .workspace import JOURNAL

_ROWS_SHOWN = 5


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
        live.refresh(math.inf)
    if len(lives) == 1:
        return _of_run(lives[0])
    title = ", ".join(run.path.name for run in runs)
    return _page("report_runs", title, lives=lives, measured_peak=measured_peak, compared=comparison(lives), pairs=_pairs(runs))


def sweep_page(path: Path) -> str:
    """Return the page of a sweep."""
    from finetune.sweep.sweep import RULE, open_sweep

    sweep = open_sweep(path)
    shown = {"sentence": sweep_sentence(sweep), "losses": Safe(losses(sweep)), "arms": arms(sweep, in_report=True)}
    return _page("report_sweep", path.name, rule=as_on_page(RULE), **shown)


def _page(template: str, title: str, **values: Any) -> str:
    # inline: the file must open offline
    names = ("theme.css", "svg_chart.css", "run.css", "new_run.css")
    style = "".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in names)
    written = time.strftime("%Y-%m-%d %H:%M")
    return render(template, title=title, style=style, written=written, pill=pill, **values) + "\n"


def _of_run(live: LiveRun) -> str:
    run, plan, digest, state, every = live.run, live.plan(), live.digest, live.state(), read_events(live.run.events)
    start = digest.newest.get(Start.kind)
    empty = f"Not evaluated yet: finetune eval {run.path.name}"
    return _page(
        "report_run", run.path.name, about=about(live), run=run, plan=plan, state=state,
        outcome=outcome(every)[0] if state.state == "finished" else "", progress=progress(live, state),
        figures=Safe((explanation_of(live, state) if state.state in BROKEN else "") + figures(digest, plan)),
        cost=cost_of(seconds_spent(every), plan.settings.price_per_hour), origin=base_adapter_of(run),
        scores=evaluations(run, rows_shown=_ROWS_SHOWN, is_open=True, empty=empty),
        # without images: a foreign run folder may name any image of this machine, and a report is passed on
        answers=Safe(answers(digest.samples, with_pictures=False)), curves=Safe(curves(live)), memory=memory(digest, plan),
        checks=[event for event in every if isinstance(event, ForecastCheck) and event.measured_allocated_bytes],
        # a changed report.json must not be shown as fact
        data_changes=changes_in(run.data, required=False, only="report.json"), data=read_object(run.data / "report.json"),
        was_edited=plan_was_edited(run.plan), verdict=Safe(plan_answer(plan, has_bar=False)), chosen=settings_table(plan),
        messages=messages(digest), versions=sorted(start.versions.items()) if isinstance(start, Start) else (),
    )  # fmt: skip


def _pairs(runs: list[RunDirectory]) -> list[tuple[str, str]]:
    # score, and difference of the tuned models on the same rows
    evaluations, rows = {run.path.name: read_evaluations(run) for run in runs}, []
    for (run_name, of_run), (other_name, of_other) in itertools.combinations(evaluations.items(), 2):
        for name in of_run.keys() & of_other.keys():
            first, second = of_run[name], of_other[name]
            same_rows = all(first[key] == second[key] for key in ("prompts", "references"))
            if same_rows and len(first["tuned"]["scores"]) > 1:
                scores = first["tuned"]["scores"], second["tuned"]["scores"]
                rows.append((name, _gap_text(run_name, other_name, *scores, score_range(name, *scores))))
            tokens = first["tuned"]["row_tokens"]
            # losses per row compare only with the same trained tokens
            if same_rows and tokens == second["tuned"]["row_tokens"] and len(tokens) > 1 and any(tokens):
                losses = first["tuned"]["row_losses"], second["tuned"]["row_losses"]
                rows.append((f"{name}: loss", _gap_text(run_name, other_name, *losses, 0.0, tokens)))
    return sorted(rows)


def _gap_text(run_name: str, other_name: str, first: list[float], second: list[float], span: float, weights: Any = None) -> str:
    return f"{other_name} - {run_name}: {format_difference(difference(first, second, weights, span=span))}"


if __name__ == "__main__":
    sys.exit(main())
