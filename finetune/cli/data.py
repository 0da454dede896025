"""`finetune data`: the rows, tokens and labels of a recipe, without training."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from finetune.cli.app import print_json
from finetune.cli.render import out, printable, table
from finetune.recipe import AUTO, load_recipe
from finetune.units import format_count

_REFUSED_SHOWN = 10


def show_data(source: str, overrides: list[str], *, as_json: bool) -> None:
    """Print rows read, used and refused, token lengths, share of trained tokens, and one example as the model sees it."""
    recipe = load_recipe(source, overrides)
    from finetune import data
    from finetune.model.configuration import named_model

    recipe, _ = named_model(recipe)

    tokenizer = data.load_tokenizer(recipe)
    limit = None if recipe.max_length == AUTO else recipe.max_length
    prepared = data.prepare(recipe, tokenizer, max_length=limit, report_only=True)
    segments = data.mark_example(prepared, tokenizer)
    if as_json:
        example = [{"text": text, "trained": trained} for text, trained in segments]
        print_json({**prepared.report.as_json(), "fingerprint": prepared.fingerprint, "example": example})
        return
    _print_report("Training rows", prepared.report)
    if prepared.eval_report is not None:
        out.print()
        _print_report("Held-out rows", prepared.eval_report)
    out.print("\n[bold]First row as the model sees it[/]; trained tokens are [black on green]marked[/]:")
    shown = Text()
    for text, trained in segments:
        shown.append(printable(text), style="black on green" if trained else "dim")
    out.print(shown)


def _print_report(title: str, report: Any) -> None:
    out.print(f"[bold]{title}[/] ({report.format})")
    shown = table("", ">")
    shown.show_header = False
    shown.add_row("read", f"{report.rows_read:,}")
    shown.add_row("used", f"{report.rows_used:,}")
    shown.add_row("refused", f"{len(report.rows_refused):,}")
    shown.add_row("over max_length", f"{report.rows_too_long:,}")
    for name in ("p50", "p95", "p99", "max"):
        shown.add_row(f"tokens {name}", format_count(report.lengths.get(name)))
    shown.add_row("trained tokens", f"{report.trained_token_share:.1%}" if report.trained_token_share is not None else "none")
    out.print(shown)
    for refused in report.rows_refused[:_REFUSED_SHOWN]:
        place = f"{refused.file}:{refused.row}{f' {refused.field}' if refused.field else ''}"
        out.print(f"  {place}: {refused.reason}", markup=False)
    for warning in report.warnings:
        out.print(f"note: {warning}", markup=False, style="yellow")
