"""Checks of the hub, the login, and a recipe's cached files."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

from finetune.data.sources import Source, sources_of
from finetune.doctor import Finding
from finetune.errors import FinetuneError, ModelError
from finetune.hub import is_switched_off
from finetune.model.configuration import CONFIG, model_file, resolve_model_path
from finetune.model.weights import INDEX, file_problem, weight_files
from finetune.settings import Recipe

TIMEOUT_S = 4.0  # seconds to wait for the hub
_OFFLINE_FIX = "Cached and local models and data work without it; check a recipe's: finetune doctor RECIPE"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json", "tiktoken.model")


def check_hub() -> Finding:
    """Check that the hub answers."""
    from huggingface_hub import constants

    if is_switched_off():
        return Finding("hub", "skip", "offline mode (HF_HUB_OFFLINE)", "unset HF_HUB_OFFLINE to download models and data")
    began_s = time.monotonic()
    problem = _problem("/api/models?limit=1")
    host = constants.ENDPOINT.rpartition("@")[2].removeprefix("https://")  # without user name and password
    if problem:
        return Finding("hub", "warn", f"{host} does not answer: {problem}", f"Check the network and proxy. {_OFFLINE_FIX}")
    return Finding("hub", "ok", f"{host} answers in {(time.monotonic() - began_s) * 1000:.0f} ms")


def check_login() -> Finding:
    """Check that the hub accepts the token."""
    from huggingface_hub import get_token

    token = get_token()
    if token is None:
        return Finding("hub login", "skip", "not logged in; only gated and private models need it", "hf auth login")
    source = "HF_TOKEN" if os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") else "hf auth login"
    if is_switched_off():
        return Finding("hub login", "skip", f"a token from {source}, not checked in offline mode")
    problem = _problem("/api/whoami-v2", token)
    if not problem:
        return Finding("hub login", "ok", f"the hub accepts the token from {source}")
    if problem in ("status 401", "status 403"):
        fix = "Make a new token at https://huggingface.co/settings/tokens, then: hf auth login"
        return Finding("hub login", "fail", f"the hub rejects the token from {source} ({problem})", fix)
    return Finding("hub login", "warn", f"a token from {source} could not be checked: {problem}", "See the line `hub`.")


def check_model(recipe: Recipe) -> Finding:
    """Check that all files of a recipe's model are on this disk."""
    name, revision = recipe.model_name_or_path, recipe.model_revision
    try:
        source = resolve_model_path(recipe)
    except FinetuneError as error:
        return Finding("model", "fail", " ".join(error.problems), error.fix)
    missing = _missing_files(recipe)
    if Path(source).is_dir():
        if missing:
            return Finding("model", "fail", f"{name}: {_shortened(missing)}", "Copy the whole folder again.")
        return Finding("model", "ok", f"{name}: complete in its folder")
    if not missing:
        return Finding("model", "ok", f"{name}: complete in the hub's cache; works offline")
    what = f"{name}: does not work offline: {_shortened(missing)}"
    command = f"hf download {source}{f' --revision {revision}' if revision else ''}"
    return Finding("model", "warn", what, f"A run downloads the missing files. To download them now: {command}")


def check_data(recipe: Recipe) -> list[Finding]:
    """Check that a recipe's data is on this disk."""
    try:
        training, held_out = sources_of(recipe.dataset)
    except FinetuneError as error:
        return [Finding("data", "fail", " ".join(error.problems), error.fix)]
    return [_source_finding(source) for source in (*training, *held_out)]


def _problem(path: str, token: str | Literal[False] = False) -> str:
    # empty if the hub answers with success
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session

    try:
        response = get_session().get(constants.ENDPOINT + path, headers=build_hf_headers(token=token), timeout=TIMEOUT_S)
        return "" if response.is_success else f"status {response.status_code}"
    except Exception as error:  # noqa: BLE001 - of httpx or httpx2, by huggingface_hub's version
        # the text may show the token, or the password of an address
        return type(error).__name__ + ("" if token or "@" in constants.ENDPOINT else f": {error}")


def _source_finding(source: Source) -> Finding:
    if source.path is not None:
        return Finding("data", "ok", f"{source.name}: a local file")
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    *owner, last = source.name.split("/")
    cache = Path(config.HF_DATASETS_CACHE) / "___".join([*owner, camelcase_to_snakecase(last)])
    if any(cache.glob("*/*/*/dataset_info.json")):
        return Finding("data", "ok", f"{source.name}: in the cache of datasets; works offline")
    fix = "Run `finetune data RECIPE` once while online: it downloads the rows."
    return Finding("data", "warn", f"{source.name}: a hub dataset that is not in the cache", fix)


def _missing_files(recipe: Recipe) -> list[str]:
    config = model_file(recipe, CONFIG)  # nothing is downloaded
    if config is None or not config.is_file():
        return [f"{CONFIG} is missing"]
    folder = config.parent
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZERS)
    problems = [] if has_tokenizer else ["its tokenizer is missing"]
    try:
        # an interrupted download may have shards and no index yet
        names = weight_files(folder) if (folder / INDEX).is_file() else ["model.safetensors"]
    except ModelError:
        return [*problems, f"{INDEX} can't be read"]
    return problems + [f"{name} {problem}" for name in names if (problem := file_problem(folder / name))]


def _shortened(problems: list[str]) -> str:
    others = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
    return "; ".join(problems[:4]) + others
