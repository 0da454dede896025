"""`finetune recipes`: the shipped recipes, all settings, and the models of the catalogue."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.padding import Padding

from finetune.cli.output import print_json
from finetune.cli.render import out, print_text, table
from finetune.errors import CommandError
from finetune.files import write_output
from finetune.model.catalogue import Entry, entries, sources
from finetune.recipe import find_recipe, load_recipe, shipped_recipes
from finetune.settings.reference import settings_reference
from finetune.units import format_count


def show_recipes(verb: str, name: str | None, *, as_json: bool) -> None:
    """List, show or copy recipes, or list the settings or the models of the catalogue."""
    if verb == "keys":
        _show_keys(as_json)
    elif verb == "models":
        show_models(as_json=as_json)
    elif verb == "show" and name:
        print_text(find_recipe(name).read_text(encoding="utf-8"))
    elif verb == "copy" and name:
        _copy(find_recipe(name))
    elif verb == "list":
        _list(as_json)
    else:
        raise CommandError(
            f"finetune recipes {verb}: unknown, or its NAME is missing", "Use: list, show NAME, copy NAME, keys, models."
        )


def _list(as_json: bool) -> None:
    rows = []
    for name, path in shipped_recipes().items():
        recipe = load_recipe(path)
        rows.append({"name": name, "model": recipe.model_name_or_path, "gpu": recipe.gpu, "max_length": recipe.max_length})
    if as_json:
        print_json(rows)
        return
    shown = table("recipe", "model", "card", ">max_length")
    for row in rows:
        shown.add_row(*(str(value) for value in row.values()))
    out.print(shown)


def _copy(path: Path) -> None:
    target = Path(path.name)
    write_output(target, path.read_text(encoding="utf-8"), new=True)
    out.print(f"{target} written; run it with: finetune run {target}")


def _show_keys(as_json: bool) -> None:
    rows = settings_reference()
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    for row in rows:
        out.print(f"[bold]{row.name}[/] = {escape(str(row.default))}")
        out.print(Padding(f"[dim]{escape(row.description)}[/]", (0, 0, 0, 4)))


def show_models(*, as_json: bool) -> None:
    """List every model of the catalogue, by family; as JSON with the source of its values."""
    rows = sorted((_row(name, entry) for name, entry in entries().items()), key=lambda row: row["family"])
    if as_json:
        print_json(rows)
        return
    for family, models in groupby(rows, key=lambda row: row["family"]):
        out.print(f"[bold]{family}[/]")
        for row in models:
            context = f"{row['max_positions']:,}" if row["max_positions"] else "?"
            out.print(f"  {row['name']:50} {format_count(row['parameters']):>7} {context:>10}", soft_wrap=True)
    out.print(
        f"{len(rows)} models with their parameters and longest context, planned without the hub; names are matched as people "
        "type them. Any other: finetune plan path/to/folder, which holds its config.json."
    )


def _row(name: str, entry: Entry) -> dict[str, Any]:
    language_model = entry.config.get("text_config", entry.config)
    return {
        "name": name,
        "family": entry.config["model_type"],
        "parameters": round(entry.parameters),
        "max_positions": language_model.get("max_position_embeddings", language_model.get("model_max_length")),
        "pretrained_only": entry.pretrained,
        "sources": [sources()[key] for key in entry.source.split(", ")],
        "date": entry.date,
    }
