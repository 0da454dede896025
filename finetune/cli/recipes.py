"""`finetune recipes` and `convert`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.padding import Padding

from finetune.cli.output import print_json
from finetune.cli.render import err, out, print_text, table
from finetune.cli.source import with_model_and_data
from finetune.errors import CommandError
from finetune.files import write_output
from finetune.model.names import entries
from finetune.recipe import find_recipe, foreign, load_recipe, shipped_recipes, write_recipe
from finetune.recipe.foreign import KeyReport, short
from finetune.settings.reference import settings_reference
from finetune.units import format_count

Row = dict[str, Any]


def show_recipes(verb: str, name: str | None, *, as_json: bool) -> None:
    """List, show or copy shipped recipes; list settings or models."""
    if verb in _LISTS:
        read_rows, print_rows = _LISTS[verb]
        (print_json if as_json else print_rows)(read_rows())
    elif verb == "show" and name:
        print_text(find_recipe(name).read_text(encoding="utf-8"))
    elif verb == "copy" and name:
        path = find_recipe(name)
        write_output(Path(path.name), path.read_text(encoding="utf-8"), must_be_new=True)  # an edited copy is never overwritten
        out.print(f"{path.name} written; run it with: finetune run {path.name}")
    else:
        raise CommandError(
            f"finetune recipes {verb}: unknown, or its NAME is missing", "Use: list, show NAME, copy NAME, keys, models."
        )


def _recipes() -> list[Row]:
    recipes = {name: load_recipe(path) for name, path in shipped_recipes().items()}
    return [
        {"name": name, "model": recipe.model_name_or_path, "gpu": recipe.gpu, "max_length": recipe.max_length}
        for name, recipe in recipes.items()
    ]


def _print_recipes(rows: list[Row]) -> None:
    shown = table("recipe", "model", "GPU", ">max_length")
    for row in rows:
        shown.add_row(*map(str, row.values()))
    out.print(shown)


def _print_keys(rows: list[Row]) -> None:
    for row in rows:
        out.print(f"[bold]{row['name']}[/] = {escape(str(row['default']))}")
        out.print(Padding(f"[dim]{escape(row['description'])}[/]", (0, 0, 0, 4)))


def _models() -> list[Row]:
    rows = []
    for name, entry in entries().items():
        # multimodal models nest their language model's configuration
        language_model = entry.config.get("text_config", entry.config)
        rows.append({
            "name": name, "family": entry.config["model_type"], "parameters": round(entry.parameters),
            "max_positions": language_model.get("max_position_embeddings", language_model.get("model_max_length")),
            "pretrained_only": entry.pretrained,
        })  # fmt: skip
    return sorted(rows, key=itemgetter("family"))


def _print_models(rows: list[Row]) -> None:
    for family, models in groupby(rows, key=itemgetter("family")):
        out.print(f"[bold]{family}[/]")
        for row in models:
            context = f"{row['max_positions']:,}" if row["max_positions"] else "?"
            out.print(f"  {row['name']:50} {format_count(row['parameters']):>7} {context:>10}", soft_wrap=True)
    out.print(
        f"{len(rows)} models with their parameters and longest context, planned offline; short names are "
        "recognised, too. For any other model: finetune plan path/to/folder, with its config.json."
    )


#: By verb: the rows, and how they are printed.
_LISTS = {
    "list": (_recipes, _print_recipes), "keys": (lambda: [asdict(row) for row in settings_reference()], _print_keys),
    "models": (_models, _print_models),
}  # fmt: skip


def convert_file(
    source: str, overrides: list[str], *, model: str | None, data: str | None, output: str | None, as_json: bool
) -> None:
    """Print or write a recipe, and report each key."""
    recipe, conversion = foreign.convert_file(source, with_model_and_data(overrides, model, data))
    text, tool = write_recipe(recipe), conversion.tool.name
    carried, not_carried = conversion.with_outcome("carried over"), conversion.with_outcome("not carried over")
    unneeded = conversion.with_outcome("no effect")
    if output is not None:
        write_output(Path(output), text, must_be_new=True)  # an edited recipe is never overwritten
    if as_json:
        keys = [asdict(key) for key in (*carried, *not_carried, *unneeded)]
        print_json({"tool": tool, "recipe": text, "keys": keys, "assumed": conversion.assumed, "notes": conversion.notes})
        return
    counts = f"{len(carried)} keys carried over, {len(not_carried)} not, {len(unneeded)} without effect here"
    err.print(f"[bold]{escape(source)}[/] is {tool}'s: {counts}", soft_wrap=True)
    defaults = ", ".join(f"{setting}: {short(value)}" for setting, value in conversion.assumed.items())
    lines = [
        *(f"[green]{escape(key.key)}[/]  {escape(key.text)}" for key in carried),
        f"[green]{tool}'s defaults[/]  {escape(defaults)}",
        *(f"[dim]{names}[/]  {reason}" for reason, names in _by_reason(unneeded)),
        *(f"[yellow]{names}[/]  not carried over: {reason}" for reason, names in _by_reason(not_carried, with_values=True)),
        *(f"[yellow]{escape(note)}[/]" for note in conversion.notes),
    ]
    for line in lines:
        err.print(f"  {line}", soft_wrap=True)
    if output is not None:
        out.print(f"{escape(output)} written; run it with: finetune run {escape(output)}")
    else:
        print_text(text)  # the only text on stdout, for a pipe


def _by_reason(keys: list[KeyReport], with_values: bool = False) -> Iterator[tuple[str, str]]:
    for reason in dict.fromkeys(key.text for key in keys):
        names = [f"{key.key} {key.value}" if with_values else key.key for key in keys if key.text == reason]
        yield escape(reason), escape(", ".join(names))
