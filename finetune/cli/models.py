"""`finetune recipes models`: the catalogue of models that are planned without the hub, by family."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from finetune.cli.output import print_json
from finetune.cli.render import out
from finetune.model.catalogue import Entry, entries, sources
from finetune.units import format_count


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
