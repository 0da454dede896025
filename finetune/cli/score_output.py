"""What `finetune eval` prints: the scores of both models, their differences with intervals, and rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from finetune.cli.render import err, out, table
from finetune.printable import printable
from finetune.run.base_adapter import base_adapter_of
from finetune.units import format_measured, format_seconds

if TYPE_CHECKING:
    from finetune.evaluate.results import Forgetting, NoCall
    from finetune.evaluate.score import Comparison
    from finetune.run.directory import RunDirectory

#: How shares and other numbers are written.
_SHARE, _NUMBER = ".1%", ".4f"
#: Orders of the rows that are shown, in words.
ORDERS = {"differ": "where they differ most", "worst": "the tuned model's worst", "best": "the tuned model's best"}


def rows_in_words(run: RunDirectory, result: Comparison, data: str | None, *, forgetting: bool) -> str:
    """Which rows were scored: `held-out rows`, with their sequences where a row has several."""
    origin = base_adapter_of(run) if forgetting else None
    kind = f"held-out rows of {Path(origin.name).name}" if origin else f"rows of {data}" if data else "held-out rows"
    sequences = len(result.tuned.row_losses)
    return f"{kind}, loss of {sequences} sequences" if sequences > result.rows else kind


def print_scores(run: RunDirectory, result: Comparison, kind: str, no_call: NoCall | None) -> None:
    """How much was scored, what a person must know first, the scores, and their differences. `kind`: of rows."""
    names = _names(result)
    reused = f", {result.reused:,} results from an earlier evaluation" if result.reused else ""
    out.print(f"[bold]{escape(str(run.path))}[/]: {result.rows} {escape(kind)}, {format_seconds(result.seconds)}{reused}")
    _print_warnings(result, no_call)
    out.print(_table(result, names))
    _print_differences(result, " - ".join(reversed(names)))


def print_forgetting(losses: list[Forgetting], no_call: NoCall | None) -> None:
    """What the training made worse of what the base could."""
    if losses:
        out.print("\nforgetting:")
    for group in losses:
        out.print(f"  {escape(group.summary())}")
    if no_call:
        out.print(f"  {escape(no_call.summary())}")


def print_rows(result: Comparison, order: str, most: int) -> None:
    """The first rows in this order, with the answers of both models."""
    from finetune.evaluate.paired import rank_rows

    base, tuned = result.base, result.tuned
    before, after = _names(result)
    rows = rank_rows(base.scores, tuned.scores, order)[:most]
    if rows:
        out.print(f"\nrows, {ORDERS[order]} first:")
    for row in rows:
        out.print(f"\n[dim]{escape(result.prompts[row].strip())}[/]")
        out.print(f"  wanted       {escape(_one_line(result.references[row]))}")
        out.print(f"  {before:6} {base.scores[row]:5.3g} {escape(_one_line(base.answers[row]))}")
        out.print(f"  {after:6} {tuned.scores[row]:5.3g} {escape(_one_line(tuned.answers[row]))}")


def _names(result: Comparison) -> tuple[str, str]:
    return ("before", "now") if result.against_adapter else ("base", "tuned")


def _print_warnings(result: Comparison, no_call: NoCall | None) -> None:
    from finetune.evaluate.call_score import NO_CALL_DUE
    from finetune.evaluate.paired import format_difference

    if no_call and no_call.is_worse:
        out.print(f"[red]worse:[/] {escape(no_call.summary())}")
    restraint = result.field_differences.get(NO_CALL_DUE)
    if restraint and restraint.is_significant and restraint.value < 0:
        verdict = format_difference(restraint, 100, " points", " - ".join(reversed(_names(result))))
        out.print(f"[red]worse:[/] calls tools in rows where none is due: {verdict}")
    if result.trained_rows:
        share = f"{result.trained_rows:,} of these {len(result.tuned.row_losses):,} sequences"
        out.print(f"[yellow]note:[/] the run was trained on {share}: what is learnt by heart scores well here")
    for note in result.notes:
        err.print(f"[yellow]{escape(note)}[/]")


def _print_differences(result: Comparison, gap: str) -> None:
    """Each difference with its interval; `gap`: what is subtracted from what."""
    from finetune.evaluate.paired import format_difference
    from finetune.evaluate.scorers import are_json_objects

    if result.tuned.answers:
        if result.score == "exact" and are_json_objects(result.references):
            out.print("the expected answers are JSON; to score them field by field:  --score json")
        if result.score != "exact":
            out.print(f"{escape(result.score)}: {format_difference(result.score_difference, names=gap)}")
        out.print(f"exact match: {format_difference(result.exact_match_difference, 100, ' points', gap)}")
        gaps = [tuned - base for base, tuned in zip(result.base.scores, result.tuned.scores, strict=True)]
        better, worse = sum(value > 0 for value in gaps), sum(value < 0 for value in gaps)
        than = "before" if result.against_adapter else "the base's"
        out.print(f"rows: {better:,} better than {than}, {worse:,} worse, {len(gaps) - better - worse:,} the same")
    if result.tuned.margins:
        out.print(f"pairs in order: {format_difference(result.pairs_in_order_difference, 100, ' points', gap)}")
        out.print(f"margin of a pair: {format_difference(result.pair_margin_difference, names=gap)}")
    if result.labels_in_order is not None:
        out.print(f"good answers gained more than bad ones in {result.labels_in_order:{_SHARE}} of all pairs of these rows")
    out.print(f"loss: {format_difference(result.loss_difference, names=gap)}")
    for name, gap_of_field in result.field_differences.items():
        out.print(f"  {escape(name)}: {format_difference(gap_of_field, 100, ' points', gap)}")


def _table(result: Comparison, names: tuple[str, str]) -> Any:
    from finetune.evaluate.scorers import VALID_LABELS

    base, tuned = result.base, result.tuned
    rows: list[tuple[str, str, float | None, float | None]] = []
    if tuned.answers:
        rows.append(("exact match", _SHARE, base.exact_match, tuned.exact_match))
    if tuned.answers and result.score != "exact":
        rows.append((escape(result.score), _NUMBER, base.score, tuned.score))
    if tuned.valid is not None:
        rows.append((VALID_LABELS.get(result.score, "valid JSON"), _SHARE, base.valid, tuned.valid))
    rows += [(f"  {escape(_one_line(name))}", _SHARE, base.fields[name], tuned.fields[name]) for name in tuned.fields]
    if tuned.margins:
        rows.append(("pairs in order", _SHARE, base.pairs_in_order, tuned.pairs_in_order))
        rows.append(("margin of a pair, nats", _NUMBER, base.pair_margin, tuned.pair_margin))
    rows.append(("loss per trained token", _NUMBER, base.loss, tuned.loss))
    rows.append(("perplexity", _NUMBER, base.perplexity, tuned.perplexity))
    rows.append(("token accuracy", _SHARE, base.token_accuracy, tuned.token_accuracy))
    shown = table("", *(f">{name}" for name in names))
    for label, form, *values in rows:
        shown.add_row(label, *(format_measured(value, form) for value in values))
    return shown


def _one_line(text: str) -> str:
    flat = " ".join(printable(text).split())
    return flat if len(flat) <= 160 else flat[:157] + "..."
