"""Page of adapters, merged models and GGUF files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from finetune.errors import FinetuneError
from finetune.run.directory import RunDirectory
from finetune.units import format_bytes

from ..language import mark, tr
from ..views.markup import Safe, inert, page_title, problem_of, table
from ..views.scores import newest_score
from ..web.followed import FollowedPage

_LISTED = 200


class ModelsPage(FollowedPage):
    """Page of models."""

    name, part_names, every_ms = "models", ("list",), 5000

    def before(self) -> str:
        return page_title("Models")

    def parts(self) -> dict[str, str]:
        files: list[ModelFile] = []
        damaged = ""
        for run in self.context.workspace.list_runs()[:_LISTED]:
            try:
                files += models_of(run, Path(self.context.lives.of(run).plan().settings.model_name_or_path).name)
            except (FinetuneError, OSError, ValueError) as error:  # the remaining runs are shown
                damaged += problem_of(error)
        return {"list": damaged + models_table(files, self.context.workspace.root)}


@dataclass(frozen=True)
class ModelFile:
    """One adapter, merged model or GGUF file."""

    run: str
    base: str
    kind: str
    path: Path
    bytes: int
    score: str = ""


def models_of(run: RunDirectory, base: str) -> Iterable[ModelFile]:
    """Yield a run's adapter, merged models and GGUF files."""
    name = run.path.name
    if run.adapter.is_dir():
        yield ModelFile(name, base, mark("adapter"), run.adapter, _size(run.adapter.rglob("*")), newest_score(run))
    for config in sorted(run.path.glob("*/config.json")):
        if any(config.parent.glob("*.safetensors")):
            yield ModelFile(name, base, mark("merged model"), config.parent, _size(config.parent.rglob("*")))
    for path in sorted([*run.path.glob("*.gguf"), *run.path.glob("*/*.gguf")]):
        yield ModelFile(name, base, "GGUF", path, path.stat().st_size)


def models_table(models: Sequence[ModelFile], root: Path) -> str:
    """Return the table of models."""
    if not models:
        hint = tr("Adapters appear here when their runs end. Merge and export them on the run's page.")
        return f'<div class="ft-empty"><p>{tr("No models yet.")}</p><p>{hint}</p></div>'
    rows = [
        [
            Safe(f'<a href="/run?run={quote(model.run)}&amp;tab=export">{inert(model.run)}</a>'), model.base, tr(model.kind),
            format_bytes(model.bytes), model.score,
            model.path.relative_to(root).as_posix() if model.path.is_relative_to(root) else str(model.path),
            Safe(f'<a href="/run?run={quote(model.run)}&amp;tab=chat">{tr("Chat")}</a>'),
        ]
        for model in models
    ]  # fmt: skip
    columns = [tr("Run"), tr("Base model"), tr("Kind"), f">{tr('Size')}", f">{tr('Score')}", tr("Where"), tr("Try")]
    return f'<section class="ft-box">{table(columns, rows, tr("Models"), hidden_caption=True)}</section>'


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())
