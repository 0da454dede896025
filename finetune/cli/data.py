"""`finetune data`."""

from __future__ import annotations

from rich.markup import escape
from rich.text import Text

from finetune.cli.output import print_json, report
from finetune.cli.render import out, show_progress, table
from finetune.cli.source import recipe_of, require_dataset
from finetune.data.report import DataReport, refusal_lines
from finetune.errors import DataError
from finetune.units import format_count

_BRACKETS = "\u27e6", "\u27e7"  # around trained tokens where there are no colours


def show_data(
    source: str | None, overrides: list[str], *, as_json: bool, model: str | None = None, data: str | None = None
) -> int:
    """Print statistics of the rows, and the first example."""
    recipe = recipe_of(source, overrides, model=model, data=data)
    require_dataset(recipe)
    with show_progress(quiet=as_json) as progress:
        progress("reading the data")
        from finetune.data.tokens import decode_spans, shorten_repeats
        from finetune.planner.planning import encode_rows
        from finetune.recipe.complete import complete

        recipe, *_ = complete(recipe)
        encoded = encode_rows(recipe, progress)
        selected = encoded.select(recipe, recipe.length_limit)
    data_error = None  # printed last: the statistics help to correct the data
    try:
        selected.raise_problems()
    except DataError as error:
        data_error = error
    ids, labels, pictures = selected.sequence()
    segments = decode_spans(ids, labels, encoded.encoder.tokenizer)
    held_out = selected.eval_report
    if as_json:
        print_json({
            **selected.report.as_json(),
            "eval_report": held_out.as_json() if held_out else None,
            "data_problem": {"problems": data_error.problems, "fix": data_error.fix} if data_error else None,
            "fingerprint": selected.fingerprint,
            "example": [{"text": text, "trained": trained} for text, trained in segments],
            "example_pictures": [
                {"path": picture.path, "width": picture.width, "height": picture.height, "digest": picture.digest}
                for picture in pictures
            ],
        })  # fmt: skip
        return data_error.exit_code if data_error else 0
    _print_report("Training rows", selected.report, data_error)
    if held_out is not None:
        out.print()
        _print_report("Held-out rows", held_out, data_error)
    if segments:
        # an image's placeholder token is repeated hundreds of times
        _print_example([(shorten_repeats(text), trained) for text, trained in segments])
        for index, picture in enumerate(pictures, 1):
            size = f"{picture.width:,} x {picture.height:,} pixels"
            out.print(f"image {index} of this row: {picture.path or 'in the row'}, {size}", markup=False, soft_wrap=True)
    return report(data_error) if data_error else 0


def _print_example(segments: list[tuple[str, bool]]) -> None:
    coloured = out.is_terminal and not out.no_color
    marking = "[black on green]marked[/]" if coloured else f"in {escape(_BRACKETS[0])} {escape(_BRACKETS[1])}"
    out.print(f"\n[bold]First row as the model sees it[/]; trained tokens are {marking}:")
    shown = Text()
    for text, trained in segments:
        opening, closing = _BRACKETS if trained and not coloured else ("", "")
        shown.append(f"{opening}{text}{closing}", style="black on green" if trained else "dim")
    out.print(shown)


def _print_report(title: str, data_report: DataReport, data_error: DataError | None) -> None:
    out.print(f"[bold]{title}[/] ({data_report.format})")
    if data_report.columns:
        columns = ", ".join(f"{column} as {name}" for name, column in data_report.columns.items())
        out.print(f"columns: {columns}", markup=False)  # names and rows may have brackets, which rich reads as styles
    out.print(data_report.account(), markup=False)
    share = "none" if data_report.trained_token_share is None else f"{data_report.trained_token_share:.1%}"
    rows = [
        ("read", f"{data_report.rows_read:,}"), ("used", f"{data_report.rows_used:,}"),
        ("refused", f"{len(data_report.rows_refused):,}"), ("over max_length", f"{data_report.rows_too_long:,}"),
    ]  # fmt: skip
    rows += [(f"tokens {name}", format_count(data_report.lengths.get(name))) for name in ("p50", "p95", "p99", "max")]
    rows.append(("trained tokens", share))
    if data_report.pictures:
        rows += data_report.pictures.lines()
    shown = table("", ">")
    shown.show_header = False
    for row in rows:
        shown.add_row(*row)
    out.print(shown)
    if data_report.rows_refused and not data_error:  # a DataError lists them at the end
        for line in refusal_lines(list(data_report.rows_refused), data_report.rows_read):
            out.print(line, markup=False)
    if len(data_report.rows_refused) > 3:
        out.print("Every refused row with its reason: --json")
    if data_report.unused_columns:
        out.print(f"columns not used: {', '.join(data_report.unused_columns)}", markup=False)
    for warning in data_report.warnings:
        out.print(f"note: {warning}", markup=False, style="yellow")
