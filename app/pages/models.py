"""Page of adapters, merged models and GGUF files."""

from __future__ import annotations

from pathlib import Path

from finetune.errors import FinetuneError

from ..views.markup import page_title
from ..views.models import ModelFile, models_of, models_table
from ..views.problems import problem_of
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
                base = Path(self.context.lives.of(run).plan().settings.model_name_or_path).name
                files += models_of(run, base, self.context.scores.of(run))
            except (FinetuneError, OSError, ValueError) as error:  # the remaining runs are shown
                damaged += problem_of(error)
        return {"list": damaged + models_table(files, self.context.workspace.root)}
