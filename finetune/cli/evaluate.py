"""`finetune eval`: the tuned model compared with the base model."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import err, out, show_progress
from finetune.cli.score_output import ORDERS, print_forgetting, print_rows, print_scores, rows_in_words
from finetune.cli.visible_devices import restrict_visible_devices
from finetune.errors import CommandError
from finetune.planner.plan import read_plan
from finetune.run.card import restrict_visible_devices
from finetune.run.directory import open_run

if TYPE_CHECKING:
    from finetune.evaluate.answerer import Answerer
    from finetune.evaluate.scorers import Scorer


def show_scores(
    source: str, *, rows: int | None, last: bool, data: str | None, score: Scorer | None, show: str, examples: int,
    as_json: bool, forgetting: bool = False, probe: bool = False,
) -> None:  # fmt: skip
    """Score base and tuned model on the held-out rows, or those of the file `data`; progress is on standard error.

    `forgetting`: on those of the run whose adapter it continued. `probe`: also measure forgetting.
    """
    if show not in ORDERS:
        raise CommandError(f"--show {show[:40]!r} is not known", f"Use one of {', '.join(ORDERS)}.")
    if forgetting and data is not None:
        raise CommandError("--forgetting and --data each choose the rows", "Keep one of them.")
    run = open_run(source)
    restrict_visible_devices(run)
    from finetune.evaluate.forgetting import load_answerer, measure_forgetting, measure_no_call
    from finetune.evaluate.score import compare

    if score is not None and score.name in ("judge", "code"):
        err.print(f"[yellow]{escape(score.score_answer.notice)}[/]")  # type: ignore[attr-defined]
    if score is not None and score.name == "judge":
        score.score_answer.keep_in(run)  # type: ignore[attr-defined]
    copies = read_plan(run.plan).layer_copies
    if copies:
        err.print(f"[dim]{copies.generation_summary}[/]")
    with show_progress(quiet=False) as progress:

        @functools.cache
        def load() -> Answerer:
            progress("loading base model and adapter")
            return load_answerer(run, last)

        result = compare(run, rows=rows, last=last, data=data, forgetting=forgetting, score=score, load=load, progress=progress)
        probe = probe and data is None and not forgetting
        losses = measure_forgetting(run, last=last, load=load, progress=progress) if probe else []
        no_call = measure_no_call(run, load, last=last, progress=progress) if probe else None
    if as_json:
        measured = {"lost": [asdict(group) for group in losses], "no_call": asdict(no_call) if no_call else None}
        print_json({"run": str(run.path), **asdict(result), **measured})
        return
    print_scores(run, result, rows_in_words(run, result, data, forgetting=forgetting), no_call)
    print_forgetting(losses, no_call)
    print_rows(result, show, examples)


def show_quantisation(source: str, *, last: bool, as_json: bool) -> None:
    """The loss of a run's base and tuned model on its held-out rows by format of the base's weights."""
    run = open_run(source)
    from finetune.cli.quantisation import measure_run, won_back
    from finetune.evaluate.answerer import adapter_folder

    folder = adapter_folder(run, last=last)
    assert folder is not None
    with show_progress(quiet=as_json) as progress:
        costs = measure_run(run, folder, progress)
    steps = won_back(run, costs["base"])
    if as_json:
        by_model = {name: cost.as_json() for name, cost in costs.items()}
        print_json({"run": str(run.path), "quantisation": by_model, "steps_to_win_back": steps})
        return
    for cost in costs.values():
        out.print(escape(cost.sentence))
    if steps is not None:
        out.print(f"The run had won back what its format costs after about {steps:,} step{'' if steps == 1 else 's'}.")
