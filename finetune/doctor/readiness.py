"""Is what a recipe needs on this machine, so that it runs without the network? Reads the caches' files, loads nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from finetune.data.sources import Source, bundled_eval, find_sources
from finetune.doctor.finding import Finding
from finetune.errors import FinetuneError
from finetune.model.configuration import resolve_model_path
from finetune.recipe import Recipe

#: Where a file of the model lies by its name; None when it is not here.
Find = Callable[[str], Path | None]
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json", "tiktoken.model")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def check_model(recipe: Recipe) -> Finding:
    """Configuration, tokenizer and every weight file, whole, in the folder or in the hub's cache."""
    name, revision = recipe.model_name_or_path, recipe.model_revision
    try:
        place = resolve_model_path(recipe)
    except FinetuneError as error:
        return Finding("model", "fail", " ".join(error.problems), error.fix)
    if Path(place).is_dir():
        missing = _missing(lambda file: path if (path := Path(place) / file).is_file() else None)
        if missing:
            return Finding("model", "fail", f"{name}: {_shown(missing)}", "Copy it again, completely.")
        return Finding("model", "ok", f"{name}: complete in its folder")
    missing = _missing(lambda file: _cached(place, file, revision))
    if not missing:
        return Finding("model", "ok", f"{name}: complete in the hub's cache; works offline")
    at = f" --revision {revision}" if revision else ""
    what = f"{name}: not ready to work offline: {_shown(missing)}"
    return Finding("model", "warn", what, f"A run downloads what is missing; before that: hf download {place}{at}")


def check_data(recipe: Recipe) -> list[Finding]:
    """Each file that the recipe names, or the hub dataset in the cache of `datasets`."""
    wanted = recipe.dataset
    try:
        sources = find_sources(
            wanted.path, config=wanted.name, split=wanted.split, revision=wanted.revision
        ) + (find_sources(wanted.eval_path, side="eval") if wanted.eval_path else bundled_eval(wanted.path))  # fmt: skip
    except FinetuneError as error:
        return [Finding("data", "fail", " ".join(error.problems), error.fix)]
    return [_source(source) for source in sources]


def _source(source: Source) -> Finding:
    if source.path is not None:
        return Finding("data", "ok", f"{source.name}: a local file", facts={"bytes": source.path.stat().st_size})
    if any(_datasets_cache(source.name).glob("*/*/*/dataset_info.json")):
        return Finding("data", "ok", f"{source.name}: in the cache of datasets; works offline")
    fix = "Run `finetune data RECIPE` once with a network: it downloads the rows."
    return Finding("data", "warn", f"{source.name}: a dataset of the hub that is not in the cache", fix)


def _missing(find: Find) -> list[str]:
    """What of a model is not here or not whole, one entry each."""
    missing = [] if find("config.json") else ["config.json is missing"]
    if not any(find(file) for file in _TOKENIZERS):
        missing.append("its tokenizer is missing")
    index = find(_INDEX)
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())) if index else [_SINGLE]
    except (ValueError, KeyError, AttributeError, TypeError, OSError):
        return [*missing, f"{_INDEX} can't be read"]
    for file in files:
        path = find(file)
        if path is None:
            missing.append(f"{file} is missing")
        elif problem := _incomplete(path):
            missing.append(f"{file} {problem}")
    return missing


def _incomplete(path: Path) -> str:
    """A safetensors file says in its header where its last tensor ends; empty when it is all there."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 0 < length <= min(size, 100_000_000) else None
        if header is None:
            return "is no safetensors file, or was cut off"
        ends = [tensor["data_offsets"][1] for key, tensor in header.items() if key != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return "is no safetensors file, or was cut off"
    end = 8 + length + max(ends, default=0)
    return "" if size == end else f"has {size:,} bytes of {end:,}"


def _cached(repo: str, file: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, file, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _datasets_cache(name: str) -> Path:
    """Where `datasets` keeps what it made of a hub dataset: owner___name_in_snake_case below its cache."""
    from huggingface_hub import constants

    root = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
    *owner, last = name.split("/")
    snake = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", last)).lower()
    return Path(root).expanduser() / "___".join([*owner, snake])


def _shown(missing: list[str]) -> str:
    rest = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    return "; ".join(missing[:4]) + rest
