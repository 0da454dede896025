"""Models, datasets and GPUs to choose from."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from finetune.data.readers import READERS
from finetune.errors import RecipeError
from finetune.recipe import load_recipe, shipped_recipes

from ..language import mark
from ..workspace import Workspace

_MOST_FOUND, _FILES_PER_FOLDER = 12, 50
DATA_ENDINGS = tuple(READERS)


@dataclass(frozen=True)
class Model:
    """A base model."""

    name: str
    #: Where the model is listed, as a text for `tr`; may contain `{recipe}`.
    source: str
    #: Size and licence on the hub; None: unknown.
    parameters: int | None = None
    licence: str | None = None
    recipe: str = ""


def local_models(workspace: Workspace) -> list[Model]:
    """Return bundled, local and downloaded models, then the shipped recipes'."""
    models = [Model(name, mark("bundled")) for name in ("tiny", "tiny-vision")]
    configs = [path for pattern in ("*/config.json", "models/*/config.json") for path in sorted(workspace.root.glob(pattern))]
    folders = [config.parent for config in configs if any(config.parent.glob("*.safetensors"))]
    models += [Model(folder.relative_to(workspace.root).as_posix(), mark("folder")) for folder in folders]
    models += [Model(name, mark("downloaded")) for name in _downloaded_models()]
    for recipe in shipped_recipes():
        models.append(Model(load_recipe(recipe).model_name_or_path, mark("recipe {recipe}"), recipe=recipe))
    names = [model.name for model in models]
    # a model that is listed twice: the first source
    return [model for index, model in enumerate(models) if model.name not in names[:index]]


def local_datasets(workspace: Workspace) -> list[str]:
    """Return bundled datasets, local files and uploads."""
    datasets = ["support", "support-pairs", "parcels"]
    for folder in (workspace.root, workspace.root / "data", workspace.folder("uploads")):
        if folder.is_dir():
            files = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in DATA_ENDINGS and path.is_file()]
            datasets += map(workspace.path_in_recipe, files[:_FILES_PER_FOLDER])
    return datasets


def search_models(query: str) -> list[Model]:
    """Search the hub for text-generation models, most downloaded first. Raises RecipeError."""
    import httpx
    from huggingface_hub import HfApi

    filters: dict[str, Any] = {"search": query[:100], "pipeline_tag": "text-generation", "limit": _MOST_FOUND}
    try:
        infos = list(HfApi().list_models(**filters, sort="downloads", expand=["safetensors", "cardData", "downloads"]))
    except (httpx.HTTPError, OSError) as error:
        raise RecipeError(
            f"the hub can't be reached: {type(error).__name__}", "Choose a local model, or give the path of a model folder."
        ) from None
    models = []
    for info in infos:
        licence = (info.card_data.to_dict() if info.card_data else {}).get("license")
        size = info.safetensors.total if info.safetensors else None
        models.append(Model(info.id, mark("hub"), size, str(licence) if licence else None))
    return models


def card_label(name: str) -> str:
    """Return `RTX 3080 Laptop` for `rtx-3080-laptop-8gb`."""
    special_cases = {"ti": "Ti", "laptop": "Laptop", "ada": "Ada", "pcie": "PCIe", "quadro": "Quadro", "titan": "Titan"}
    parts = [part for part in name.split("-") if not part.endswith("gb")]
    return " ".join(special_cases.get(part, part.upper()) for part in parts)


def _downloaded_models() -> list[str]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with contextlib.suppress(CacheNotFound):
        return sorted(repository.repo_id for repository in scan_cache_dir().repos if repository.repo_type == "model")
    return []
