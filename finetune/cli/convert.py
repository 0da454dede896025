"""`finetune convert`: another tool's configuration as a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import err, out, print_text
from finetune.cli.source import with_model_and_data
from finetune.files import write_output
from finetune.recipe import foreign, write_recipe
from finetune.recipe.foreign import KeyReport, short


def convert_file(
    source: str, overrides: list[str], *, model: str | None, data: str | None, output: str | None, as_json: bool
) -> None:
    """Print or write a recipe, and report each key."""
    recipe, read = foreign.convert_file(source, with_model_and_data(overrides, model, data))
    # stdout has the recipe alone, for a pipe
    text, tool = write_recipe(recipe), read.tool.name
    carried, not_carried = read.with_outcome("carried over"), read.with_outcome("not carried over")
    unneeded = read.with_outcome("no effect")
    if output is not None:
        write_output(Path(output), text, new=True)  # an edited recipe is never overwritten
    if as_json:
        keys = [asdict(key) for key in (*carried, *not_carried, *unneeded)]
        print_json({"tool": tool, "recipe": text, "keys": keys, "assumed": read.assumed, "notes": read.notes})
        return
    counts = f"{len(carried)} keys carried over, {len(not_carried)} not, {len(unneeded)} without effect here"
    err.print(f"[bold]{escape(source)}[/] is {tool}'s: {counts}", soft_wrap=True)
    defaults = ", ".join(f"{setting}: {short(value)}" for setting, value in read.assumed.items())
    lines = [
        *(f"[green]{escape(key.key)}[/]  {escape(key.text)}" for key in carried),
        f"[green]{tool}'s defaults[/]  {escape(defaults)}",
        *(f"[dim]{names}[/]  {reason}" for reason, names in _by_reason(unneeded)),
        *(f"[yellow]{names}[/]  not carried over: {reason}" for reason, names in _by_reason(not_carried, with_values=True)),
        *(f"[yellow]{escape(note)}[/]" for note in read.notes),
    ]
    for line in lines:
        err.print(f"  {line}", soft_wrap=True)
    if output is not None:
        out.print(f"{escape(output)} written; run it with: finetune run {escape(output)}")
    else:
        print_text(text)


def _by_reason(keys: list[KeyReport], with_values: bool = False) -> Iterator[tuple[str, str]]:
    for reason in dict.fromkeys(key.text for key in keys):
        names = [f"{key.key} {key.value}" if with_values else key.key for key in keys if key.text == reason]
        yield escape(reason), escape(", ".join(names))
