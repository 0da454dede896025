"""`finetune eval --tasks`: benchmark tasks of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import out, show_progress, table
from finetune.cli.visible_devices import restrict_visible_devices
from finetune.errors import CommandError
from finetune.run.card import restrict_visible_devices
from finetune.run.directory import open_run


def show_tasks(source: str, tasks: str, *, rows: int | None, last: bool, others: Sequence[str], as_json: bool) -> None:
    """Score base and tuned model on tasks, separated by commas. `others`: given options that belong to other scores."""
    if others:
        raise CommandError(f"--tasks has its own rows and scores, without {', '.join(others)}", "Leave one of them out.")
    run = open_run(source)
    restrict_visible_devices(run)
    from finetune.evaluate.paired import format_difference
    from finetune.evaluate.tasks import measure_tasks

    with show_progress(quiet=as_json) as progress:
        scores = measure_tasks(run, tasks.split(","), rows=rows, last=last, progress=progress)
    if as_json:
        print_json({"run": str(run.path), "tasks": [asdict(score) for score in scores]})
        return
    for score in scores:
        if score.is_worse:
            out.print(f"[red]worse:[/] {escape(score.task)}, {escape(score.metric)}")
    shown = table("task", "metric", ">rows", ">base", ">tuned")
    for score in scores:
        base, tuned = ("-" if value is None else f"{value:.4f}" for value in (score.base, score.tuned))
        shown.add_row(escape(score.task), escape(score.metric), f"{score.rows:,}", base, tuned)
    out.print(shown)
    for score in scores:
        if score.difference is not None:
            out.print(f"{escape(score.task)}, {escape(score.metric)}: {format_difference(score.difference)}")
