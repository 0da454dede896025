"""A model's config.json from a folder, the hub or the catalogue, without importing torch; how its weights are stored."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import hub
from finetune.bundled import model_path
from finetune.errors import ModelError, RecipeError
from finetune.files import GGUF_FIX, IS_GGUF, LFS_FIX, expanded, parse_json, read_limited, read_object
from finetune.model.names import Match, catalogue, resolve, suggestions
from finetune.settings.base_formats import BITS_16, INT8, NF4, BaseFormat

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
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
#: Upper limits for counts of what is built one by one: layers, and entries of id2label.
_MAX_COUNTS = {"num_hidden_layers": 10_000, "num_labels": 100_000}
#: Bytes read of a config.json or README.
_MAX_BYTES = 4_000_000
DOWNLOAD_AGAIN = f"Download the model again, or give another folder. (Files from git-lfs: {LFS_FIX})"
#: End of the fix for an unknown model.
FROM_CONFIG = "the folder that holds its config.json: finetune plan path/to/folder"


def resolve_model_path(settings: Recipe) -> str:
    """Return the model's folder or hub id. Raises ModelError."""
    name = settings.model_name_or_path
    if bundled := model_path(name):
        return str(bundled)
    path = expanded(name)
    refuse_non_model(path, f"model_name_or_path {name}")
    if path.is_dir():
        return str(path)
    if name.startswith(("/", "./", "../", "~")) and not path.exists():
        problem = f"the base model's folder is missing: {path.absolute()}"
        raise ModelError(problem, "Restore it, or set model_name_or_path to its new path.")
    if not hub.HUB_ID.fullmatch(name) or path.is_file():
        raise ModelError(
            f"model_name_or_path {name} is neither a model folder nor a hub id",
            f"{_did_you_mean(name)}Give an id such as Qwen/Qwen3-8B, or {FROM_CONFIG}.",
        )
    return name


def refuse_non_model(path: Path, name: str) -> None:
    """Raise ModelError for a run, an adapter, a GGUF file or another folder without a model."""
    run = next((folder for folder in (path, path.parent) if (folder / "plan.json").is_file()), None)
    fix = f"Merge its adapter: finetune merge {run}. " if run else ""
    if path.suffix.lower() == ".gguf":
        problem, fix = IS_GGUF, GGUF_FIX
    elif not path.is_dir() or (path / CONFIG).is_file():
        return
    elif (path / ADAPTER_CONFIG).is_file():
        base = (read_object(path / ADAPTER_CONFIG) or {}).get("base_model_name_or_path")
        problem = "holds an adapter, not a model"
        fix += f"To train it further, give its base model, {base}, and adapter_name_or_path={path}"
    elif run == path:
        problem = "is a run, not a model"
    elif gguf := next(path.glob("*.gguf"), None):
        problem, fix = f"has no config.json; {gguf.name} {IS_GGUF}", GGUF_FIX
    else:
        problem, fix = "has no config.json", "Give a folder saved with save_pretrained, or a hub id."
    raise ModelError(f"{name} {problem}", fix)


def read_config(settings: Recipe) -> dict[str, Any]:
    """Return the content of config.json. Raises RecipeError."""
    path = resolve_model_path(settings)
    if file := model_file(settings, CONFIG):
        return _parsed(file, path)
    text, problem = _fetch(path, settings.model_revision or "main")
    if text is not None:
        return _parsed(text, path)
    models = catalogue()
    if path in models:
        return dict(models[path])
    problem = f"{problem}; it is not in the catalogue either"
    if Path(path).parent.is_dir():  # a folder may be meant: the parent of a hub id is an account
        problem = f"there is no folder {Path(path).absolute()}; as a hub id: {problem}"
    raise ModelError(
        f"model_name_or_path {path}: {problem}", f"{_did_you_mean(path)}Give the hub id in full, or {FROM_CONFIG}."
    )


def vocabulary_size(settings: Recipe) -> int | None:
    """Return the number of rows of the model's embedding, or None if config.json lacks it. Raises RecipeError."""
    values = read_config(settings)
    parts = [values, *(values[name] for name in ("text_config", "llm_config") if isinstance(values.get(name), dict))]
    sizes = [part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)]
    # a multimodal model's text part is last
    return sizes[-1] if sizes else None


def card_value(settings: Recipe, key: str) -> str | None:
    """Return the first value of `key` in the header of the model's README, or None."""
    try:
        file = model_file(settings, "README.md")
        text = read_limited(file, _MAX_BYTES).decode("utf-8", "replace") if file else ""
    except (RecipeError, OSError, ValueError):
        return None
    # by a pattern, because other values may be nested too deeply for a YAML parser
    match = re.match(rf"---\s*\n(?:(?!---).*\n)*?{key}:(?:\s*-)?[ \t]*\[?[ \t]*['\"]?([\w./+-]+)", text)
    return match[1] if match else None


def match_name(typed: str, revision: str | None) -> Match:
    """Return the hub id for an informal model name. Known ids and folders stay unchanged."""
    unchanged = Match(typed, "")
    if model_path(typed) or revision or typed in catalogue() or expanded(typed).exists():
        return unchanged
    match = resolve(typed)
    is_hub_id = match and hub.HUB_ID.fullmatch(typed) and (hub.cached_file(typed, CONFIG, None) or _fetch(typed, "main")[0])
    return unchanged if match is None or is_hub_id else match


def _did_you_mean(name: str) -> str:
    similar = suggestions(name)
    return f"Did you mean {' or '.join(similar)}? " if similar else ""


def default_attention(values: dict[str, Any]) -> str:
    """Return the default `attn_implementation` for a config.json's model type."""
    return "eager" if values.get("model_type") in _EAGER_ONLY else "sdpa"


def _parsed(source: str | Path, path: str) -> dict[str, Any]:
    try:
        content = source if isinstance(source, str) else read_limited(source, _MAX_BYTES)
        # transformers writes infinity, which JSON lacks, as `{"__float__": "Infinity"}`
        values = parse_json(content, object_hook=lambda part: float(part["__float__"]) if list(part) == ["__float__"] else part)
    except (OSError, ValueError) as error:
        raise ModelError(f"model_name_or_path {path}: config.json can't be read: {error}", DOWNLOAD_AGAIN) from None
    if not isinstance(values, dict):
        raise ModelError(f"model_name_or_path {path}: config.json is not an object", DOWNLOAD_AGAIN)
    for part in (values, values.get("text_config")):
        for name, limit in _MAX_COUNTS.items():
            count = part.get(name) if isinstance(part, dict) else None
            if isinstance(count, (int, float)) and count > limit:
                raise ModelError(f"model_name_or_path {path}: config.json has {name} {count:,}, more than {limit:,}")
    return values


def model_file(settings: Recipe, name: str) -> Path | None:
    """Return the path of a model's file on this disk, or None. In a folder the file may be missing."""
    source = resolve_model_path(settings)  # a string: on Windows, Path would turn the slash of a hub id into a backslash
    return Path(source) / name if Path(source).is_dir() else hub.cached_file(source, name, settings.model_revision)


def _fetch(repo: str, revision: str) -> tuple[str | None, str]:
    # returns the text and "", or None and the problem
    from huggingface_hub import constants, get_token

    if hub.is_switched_off():
        return None, "not in the local cache, with the hub switched off (HF_HUB_OFFLINE)"
    if not hub.is_reachable():
        return None, "not in the local cache, with the hub out of reach"
    # not by the hub's client, whose retries take 20 s without a network
    request = urllib.request.Request(f"{constants.ENDPOINT}/{repo}/resolve/{revision}/{CONFIG}")
    token = get_token()
    if token:
        # unredirected: redirect targets do not get the token
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S) as answer:
            return answer.read(_MAX_BYTES).decode("utf-8"), ""
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return None, "the hub denies access (gated, private or misspelt): accept the terms and run `hf auth login`"
        return None, f"the hub returned {error.code} for {revision}/{CONFIG}"
    except (OSError, UnicodeDecodeError) as error:
        return None, f"the hub can't be reached ({getattr(error, 'reason', error)})"


BITSANDBYTES = "bitsandbytes"
#: Quantisation methods that transformers can undo while loading.
DEQUANTISED = ("mxfp4", "fp8")


def stored_quantisation(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return config.json's `quantization_config`; empty for a 16-bit model. Raises RecipeError if it is not an object."""
    stored = values.get("quantization_config")
    if stored is None or stored == {}:
        return {}
    stored = stored.to_dict() if hasattr(stored, "to_dict") else stored
    if not isinstance(stored, dict):
        raise RecipeError(
            f"model_name_or_path {name}: quantization_config in its config.json is {stored!r}, not an object",
            "Give the published model.",
        )
    method = stored.get("quant_method")
    # bitsandbytes' first versions wrote no method
    if method is None and (stored.get("load_in_4bit") or stored.get("load_in_8bit")):
        method = BITSANDBYTES
    return {**stored, "quant_method": getattr(method, "value", method)}


def stored_format(stored: dict[str, Any]) -> BaseFormat:
    """Return the format of a checkpoint that bitsandbytes stored."""
    return NF4 if stored.get("load_in_4bit") else INT8


def stored_notes(stored: dict[str, Any]) -> tuple[str, ...]:
    """Return notes on weights that bitsandbytes stored."""
    is_4bit = stored.get("quant_method") == BITSANDBYTES and stored_format(stored) is NF4
    if not is_4bit or stored.get("bnb_4bit_quant_type") == "nf4":
        return ()
    # FP4, bitsandbytes' default, is trained without conversion
    return ("the checkpoint's 4-bit weights are FP4: as many bytes as NF4's, but further from the 16-bit weights",)


def trainable_formats(stored: dict[str, Any]) -> tuple[BaseFormat, ...]:
    """Return the formats that a quantised checkpoint can be trained in; empty for 16 bit."""
    if not stored:
        return ()
    if stored["quant_method"] == BITSANDBYTES:
        return (stored_format(stored),)
    # dequantised while loading; mxfp4 can be quantised again to NF4
    return (BITS_16, NF4) if stored["quant_method"] == "mxfp4" else (BITS_16,)
