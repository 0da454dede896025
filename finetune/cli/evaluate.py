"""`finetune eval`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import err, out, show_progress, table
from finetune.planner.plan import read_plan
from finetune.run.card import restrict_visible_devices
from finetune.run.directory import RunDirectory, open_run
from finetune.units import format_seconds, printable

if TYPE_CHECKING:
    from finetune.evaluate.results import Comparison, Forgetting

#: Values of --show, as printed.
ORDERS = {"differ": "largest difference", "worst": "the tuned model's worst", "best": "the tuned model's best"}


def evaluate_run(
    source: str, *, rows: int | None, data: str | None, probe: bool, score: str | None,
    pattern: str | None, tolerance: float, show: str, examples: int, quantisation: bool, as_json: bool,
) -> None:  # fmt: skip
    """Score a run on rows, or measure quantisation."""
    if quantisation:
        _show_quantisation(source, as_json=as_json)
        return
    from finetune.evaluate.scorers import scorer

    chosen_scorer = scorer(score or "exact", pattern=pattern, tolerance=tolerance) if score or pattern or tolerance else None
    run = open_run(source)
    restrict_visible_devices(run)  # before the imports: importing bitsandbytes opens CUDA
    from finetune.evaluate.answerer import answerer_loader
    from finetune.evaluate.score import compare, measure_forgetting

    if copies := read_plan(run.plan).layer_copies:
        err.print(f"[dim]{copies.generation_summary}[/]")
    with show_progress(quiet=False) as progress:  # on stderr, even beside JSON: scoring takes minutes
        load = answerer_loader(run, progress)
        result = compare(run, rows=rows, data=data, score=chosen_scorer, load=load, progress=progress)
        # --data chooses the only rows to score
        forgetting = measure_forgetting(run, load, progress) if probe and data is None else None
    if as_json:
        print_json({"run": str(run.path), **asdict(result), "lost": asdict(forgetting) if forgetting else None})
    else:
        _print_scores(run, result, forgetting)
        _print_rows(result, show, examples)


def _print_scores(run: RunDirectory, result: Comparison, forgetting: Forgetting | None) -> None:
    subject = f"rows of {result.data}" if result.data else "held-out rows"
    if (sequences := len(result.tuned.row_losses)) > result.rows:
        subject += f", loss of {sequences} sequences"
    reused = f", {result.reused:,} results reused from an earlier evaluation" if result.reused else ""
    out.print(f"[bold]{escape(str(run.path))}[/]: {result.rows} {escape(subject)}, {format_seconds(result.seconds)}{reused}")
    if result.score_because:
        out.print(f"[dim]score: {result.score}, chosen for {result.score_because}; choose another with --score NAME[/]")
    _print_warnings(result)
    _print_measures(result)
    if forgetting:
        out.print(forgetting.summary())


def _show_quantisation(source: str, *, as_json: bool) -> None:
    run = open_run(source)
    from finetune.evaluate.quantisation import measure_run

    with show_progress(quiet=as_json) as progress:
        costs = measure_run(run, progress)
    if as_json:
        print_json({"run": str(run.path), "quantisation": {name: cost.as_json() for name, cost in costs.items()}})
        return
    for cost in costs.values():
        out.print(escape(cost.sentence))


def _print_rows(result: Comparison, order: str, limit: int) -> None:
    from finetune.evaluate.results import rank_rows

    rows = rank_rows(result.base.scores, result.tuned.scores, order)[:limit]
    if rows:
        out.print(f"\nrows by score ({escape(result.score)}), {ORDERS[order]} first:")
    for row in rows:
        out.print(f"\n[dim]{escape(result.prompts[row].strip())}[/]")
        out.print(f"  wanted       {_escaped_line(result.references[row])}")
        for name, model in result.models.items():
            if model.thoughts[row]:
                out.print(f"  {name:12} [dim]{_escaped_line(model.thoughts[row])}[/]")
            out.print(f"  {name:6} {model.scores[row]:5.3g} {_escaped_line(model.answers[row]) or '(empty)'}")


def _print_warnings(result: Comparison) -> None:
    from finetune.evaluate.results import format_difference
    from finetune.evaluate.scorers import NO_CALL_DUE

    no_call_due = result.field_differences.get(NO_CALL_DUE)
    if no_call_due and no_call_due.is_significant and no_call_due.value < 0:
        points = format_difference(no_call_due, 100, " points")
        out.print(f"[red]worse:[/] calls tools in rows that need no call; right answers there: {points}")
    if result.trained_rows:
        share = f"{result.trained_rows:,} of these {len(result.tuned.row_losses):,} sequences"
        out.print(f"[yellow]note:[/] the run was trained on {share}: memorised rows score well here")
    if result.base_prompt_end.strip():
        end = _escaped_line(result.base_prompt_end)
        out.print(f"[dim]The base model is asked to answer without a thought: its prompts end with {end}[/]")
    elif any(result.base.thoughts):
        out.print(f"[dim]Answers have at most {result.max_new_tokens:,} tokens, thoughts included.[/]")
    for name, model in result.models.items():
        if model.cut:
            limit = f"the limit of {result.max_new_tokens:,} tokens"
            out.print(f"[yellow]note:[/] {name}: {model.cut:,} of {len(model.answers):,} answers were cut at {limit}")
    for note in result.notes:
        err.print(f"[yellow]{escape(note)}[/]")


def _print_measures(result: Comparison) -> None:
    from finetune.evaluate.results import measures

    figures = measures(asdict(result))
    shown = table("", *(f">{name}" for name in result.models))
    for figure in figures:
        shown.add_row(_escaped_line(figure.title), *figure.values)
    out.print(shown)
    for figure in figures:
        if figure.difference:
            out.print(f"{_escaped_line(figure.title)}: {figure.gap}")
    if result.tuned.answers:
        gains = [tuned - base for base, tuned in zip(result.base.scores, result.tuned.scores, strict=True)]
        better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        equal, reference = len(gains) - better - worse, "before" if result.against_adapter else "the base's"
        out.print(f"rows by {escape(result.score)}: {better:,} better than {reference}, {worse:,} worse, {equal:,} the same")
    if result.labels_in_order is not None:
        out.print(f"good answers gained more than bad ones in {result.labels_in_order:.1%} of all pairs of these rows")


def _escaped_line(text: str) -> str:
    flat = " ".join(printable(text).split())
    return escape(flat if len(flat) <= 160 else flat[:157] + "...")
