"""`finetune recipes`: shipped recipes, settings and models."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.padding import Padding

from finetune.cli.output import print_json
from finetune.cli.render import out, print_text, table
from finetune.errors import CommandError
from finetune.files import write_output
from finetune.model.catalogue import entries, sources
from finetune.recipe import find_recipe, load_recipe, shipped_recipes
from finetune.settings.reference import settings_reference
from finetune.units import format_count

Row = dict[str, Any]


def show_recipes(verb: str, name: str | None, *, as_json: bool) -> None:
    """List, show or copy."""
    if verb in _LISTS:
        rows, show = _LISTS[verb]
        (print_json if as_json else show)(rows())
    elif verb == "show" and name:
        print_text(find_recipe(name).read_text(encoding="utf-8"))
    elif verb == "copy" and name:
        path = find_recipe(name)
        write_output(Path(path.name), path.read_text(encoding="utf-8"), new=True)  # an edited copy is never overwritten
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
    shown = table("recipe", "model", "card", ">max_length")
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
        # multimodal models nest the values of their language model
        language_model = entry.config.get("text_config", entry.config)
        rows.append({
            "name": name, "family": entry.config["model_type"], "parameters": round(entry.parameters),
            "max_positions": language_model.get("max_position_embeddings", language_model.get("model_max_length")),
            "pretrained_only": entry.pretrained, "sources": [sources()[key] for key in entry.source.split(", ")],
            "date": entry.date,
        })  # fmt: skip
    return sorted(rows, key=itemgetter("family"))


def _print_models(rows: list[Row]) -> None:
    for family, models in groupby(rows, key=itemgetter("family")):
        out.print(f"[bold]{family}[/]")
        for row in models:
            context = f"{row['max_positions']:,}" if row["max_positions"] else "?"
            out.print(f"  {row['name']:50} {format_count(row['parameters']):>7} {context:>10}", soft_wrap=True)
    out.print(
        f"{len(rows)} models with their parameters and longest context, planned without the hub; names are matched as people "
        "type them. Any other: finetune plan path/to/folder, which holds its config.json."
    )


_LISTS = {
    "list": (_recipes, _print_recipes), "keys": (lambda: [asdict(row) for row in settings_reference()], _print_keys),
    "models": (_models, _print_models),
}  # fmt: skip
