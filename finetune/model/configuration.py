"""Finds a model and reads its config.json from a folder, the hub or the packaged catalogue, without importing torch."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import hub
from finetune.bundled import model_path
from finetune.errors import ModelError
from finetune.files import parse_json
from finetune.model.catalogue import catalogue
from finetune.model.names import resolve, suggestions
from finetune.model.unknown_names import why_unknown

if TYPE_CHECKING:
    from finetune.settings import Recipe


#: Seconds to wait for the hub before the catalogue is used.
HUB_TIMEOUT_S = 5.0
#: Model types whose attention transformers 5.23 or 5.24 does not run through torch's fused kernels (`_supports_sdpa` is False).
_EAGER_ONLY = {
    "bloom", "codegen", "cpmant", "deepseek_v4", "falcon_mamba", "flint", "gemma2", "git", "got_ocr2", "gpt_neo",
    "gpt_neox_japanese", "gpt_oss", "gptj", "granite_swa", "granitemoe_swa", "hy_v4", "hy_v4_vl", "inkling2", "inkling2_loop",
    "inkling2_loop_text", "inkling2_text", "mamba", "mamba2", "mimo_v2_flash", "mpt", "openai-gpt", "pp_chart2table", "rwkv",
    "vaultgemma", "xglm", "xlm", "xlnet", "xlstm",
}  # fmt: skip
ADAPTER_CONFIG = "adapter_config.json"
MAX_LAYERS = 10_000
#: How a model that nothing here knows is planned.
FROM_CONFIG = "the folder that holds its config.json: finetune plan path/to/folder"


def resolve_model_path(settings: Recipe) -> str:
    """The folder or hub id to load. Raises RecipeError when it is neither, or a folder without config.json."""
    name = settings.model_name_or_path
    if bundled := model_path(name):
        return str(bundled)
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - of an unknown user it stays as it is
    if path.is_dir():
        if not (path / "config.json").is_file():
            if (path / ADAPTER_CONFIG).is_file():
                raise ModelError(
                    f"model_name_or_path {name} holds an adapter, not a model",
                    "Give the base model, or merge the adapter first.",
                )
            raise ModelError(
                f"model_name_or_path {name} has no config.json", "Give a folder saved with save_pretrained, or a hub id."
            )
        return str(path)
    if name.startswith(("/", "./", "../", "~")) or not hub.HUB_ID.fullmatch(name) or path.is_file():
        raise ModelError(
            f"model_name_or_path {name} is not a model folder and not a hub id",
            f"{_did_you_mean(name)}Give an id such as Qwen/Qwen3-8B, or {FROM_CONFIG}.",
        )
    return name


def read_config(settings: Recipe) -> dict[str, Any]:
    """The content of config.json from the folder, the hub's cache, the hub or the catalogue. Raises RecipeError."""
    path = resolve_model_path(settings)
    if Path(path).is_dir():
        return _parsed((Path(path) / "config.json").read_bytes(), path)
    cached = _cached_on_disk(path, settings.model_revision)
    if cached is not None:
        return cached
    text, problem = _fetch(path, settings.model_revision or "main")
    if text is not None:
        return _parsed(text, path)
    models = catalogue()
    if path in models:
        return dict(models[path])
    fix = f"{_did_you_mean(path)}Give the hub id in full, or {FROM_CONFIG}."
    raise ModelError(f"model_name_or_path {path}: {problem}, and it is not in the catalogue", fix)


def vocabulary_size(settings: Recipe) -> int | None:
    """Rows of the model's embedding by its config.json; None where that lacks it. Raises RecipeError."""
    values = read_config(settings)
    parts = [values, *(values[name] for name in ("text_config", "llm_config") if isinstance(values.get(name), dict))]
    sizes = [part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)]
    return sizes[-1] if sizes else None


def read_text(path: str, name: str, revision: str | None) -> str | None:
    """A small text file beside config.json, from the folder, the hub's cache or the hub; None when there is none."""
    is_local = Path(path).is_dir()
    file = Path(path) / name if is_local else hub.cached_file(path, name, revision)
    if file is not None and file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    return None if is_local else _fetch(path, revision or "main", name)[0]


def named_model(recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe with the model's hub id in place of a name like it, and a sentence that says so, or nothing.

    What is a folder, or an id that this machine or the hub has, stays; so does a name that could be several models.
    """
    from finetune.settings import resolved

    typed, revision = recipe.model_name_or_path, recipe.model_revision
    if model_path(typed) or revision or typed in catalogue() or Path(os.path.expanduser(typed)).exists():  # noqa: PTH111
        return recipe, ""
    match = resolve(typed)
    if match is None or (hub.HUB_ID.fullmatch(typed) and (_cached_on_disk(typed, None) or _fetch(typed, "main")[0])):
        return recipe, ""
    return resolved(recipe, model_name_or_path=match.name), match.note


def _did_you_mean(name: str) -> str:
    if unknown := why_unknown(name):
        return f"{name} {unknown[0]}. {unknown[1]} "
    close = suggestions(name)
    return f"Did you mean {' or '.join(close)}? " if close else ""


def default_attention(values: dict[str, Any]) -> str:
    """Default `attn_implementation` for a config.json: sdpa where the model type supports it, else eager."""
    return "eager" if values.get("model_type") in _EAGER_ONLY else "sdpa"


def _parsed(text: str | bytes, path: str) -> dict[str, Any]:
    try:
        values = parse_json(text, object_hook=_with_floats)
    except ValueError as error:
        raise ModelError(f"model_name_or_path {path}: config.json is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"model_name_or_path {path}: config.json is not an object")
    for part in (values, values.get("text_config")):  # each layer is built, on fake tensors
        layers = part.get("num_hidden_layers") if isinstance(part, dict) else None
        if isinstance(layers, (int, float)) and layers > MAX_LAYERS:
            raise ModelError(f"model_name_or_path {path}: config.json has {layers:,} layers, more than {MAX_LAYERS:,}")
    return values


def _with_floats(values: dict[str, Any]) -> Any:
    """transformers writes infinity, which JSON lacks, as `{"__float__": "Infinity"}`."""
    return float(values["__float__"]) if list(values) == ["__float__"] else values


def _cached_on_disk(repo: str, revision: str | None) -> dict[str, Any] | None:
    config_path = hub.cached_file(repo, "config.json", revision)
    return _parsed(config_path.read_bytes(), repo) if config_path else None


def _fetch(repo: str, revision: str, name: str = "config.json") -> tuple[str | None, str]:
    """A file from the hub, or None and why not. One attempt: the hub client's retries take 20 s without a network."""
    from huggingface_hub import constants, get_token

    if hub.is_switched_off():
        return None, "not in the local cache and the hub is switched off (HF_HUB_OFFLINE)"
    if not hub.is_reachable():
        return None, "not in the local cache and the hub can't be reached"
    request = urllib.request.Request(f"{constants.ENDPOINT}/{repo}/resolve/{revision}/{name}")
    token = get_token()
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S) as answer:
            return answer.read(4_000_000).decode("utf-8"), ""
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return (
                None,
                "the hub does not show it to you (gated, private or misspelt); accept its terms and run `hf auth login`",
            )
        return None, f"the hub answers {error.code} for {revision}/{name}"
    except (OSError, UnicodeDecodeError) as error:
        return None, f"the hub can't be reached ({getattr(error, 'reason', error)})"
