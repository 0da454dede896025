"""`finetune convert`: another tool's configuration as a recipe."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.markup import escape

from finetune.cli.output import print_json
from finetune.cli.render import err, out, print_text
from finetune.cli.source import with_model_and_data
from finetune.files import write_output
from finetune.recipe import write_recipe

_COLOURS = {"carried over": "green", "no effect": "dim"}


def convert_file(
    source: str, overrides: list[str], *, model: str | None = None, data: str | None = None, output: str | None, as_json: bool
) -> None:
    """Print the recipe, or write it to `output`; says on standard error what became of each key."""
    from finetune.recipe.foreign import convert_file as convert

    recipe, read = convert(source, with_model_and_data(overrides, model, data))
    text = write_recipe(recipe)
    if output is not None:
        write_output(Path(output), text, new=True)
    if as_json:
        keys = [asdict(entry) for entry in read.entries]
        print_json({"tool": read.tool, "recipe": text, "keys": keys, "assumed": read.assumed, "notes": read.notes})
        return
    err.print(f"[bold]{escape(source)}[/] is {read.tool}'s: {read.summary()}")
    for entry in read.entries:
        err.print(f"  [{_COLOURS[entry.outcome]}]{escape(entry.key)}[/]  {escape(entry.text)}", soft_wrap=True)
        if entry.note:
            err.print(f"    [yellow]{escape(entry.note)}[/]", soft_wrap=True)
    for setting, value in read.assumed.items():
        err.print(f"  [green]{setting}: {escape(str(value))}[/]  {read.tool}'s default", soft_wrap=True)
    for remark in read.remarks:
        err.print(f"  [yellow]{escape(remark)}[/]", soft_wrap=True)
    if output is not None:
        out.print(f"{escape(output)} written; run it with: finetune run {escape(output)}")
    else:
        print_text(text)
