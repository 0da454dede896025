"""Page of adapters, merged models and GGUF files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.run.directory import RunDirectory
from finetune.units import format_bytes

from ..language import tr
from ..views.markup import page_title, problem_of, render
from ..views.scores import newest_score
from ..web.followed import FollowedPage

_LISTED = 200


class ModelsPage(FollowedPage):
    """Page of models."""

    name, part_names, every_ms = "models", ("list",), 5000

    def before(self) -> str:
        return page_title("Models")

    def parts(self) -> dict[str, str]:
        models: list[dict[str, Any]] = []
        damaged = ""
        for run in self.context.workspace.list_runs()[:_LISTED]:
            try:
                base = Path(self.context.lives.of(run).plan().settings.model_name_or_path).name
                models += [{**model, "run": run.path.name, "base": base} for model in models_of(run)]
            except (FinetuneError, OSError, ValueError) as error:  # the remaining runs are shown
                damaged += problem_of(error)
        return {"list": damaged + render("models", models=models, shown=self.context.workspace.shown)}


def models_of(run: RunDirectory) -> Iterable[dict[str, Any]]:
    """Yield kind, path and size of a run's adapter, merged models and GGUF files."""
    if run.adapter.is_dir():
        yield {"kind": tr("adapter"), "path": run.adapter, "size": _size(run.adapter), "score": newest_score(run)}
    for config in sorted(run.path.glob("*/config.json")):
        if any(config.parent.glob("*.safetensors")):
            yield {"kind": tr("merged model"), "path": config.parent, "size": _size(config.parent)}
    for path in sorted([*run.path.glob("*.gguf"), *run.path.glob("*/*.gguf")]):
        yield {"kind": "GGUF", "path": path, "size": format_bytes(path.stat().st_size)}


def _size(folder: Path) -> str:
    return format_bytes(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
