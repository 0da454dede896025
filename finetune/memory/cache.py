"""On-disk cache of dry runs, readable without torch; keyed by configuration, settings, library versions and our code."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from finetune.files import cache_dir, from_json, read_object, to_json, with_checksum, write_text
from finetune.requirements import installed_version

#: Libraries whose code decides how much memory a step takes.
LIBRARIES = (
    "torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate",
    "fla-core", "flash-linear-attention", "causal-conv1d", "mamba-ssm", "triton",
)  # fmt: skip
_OWN_CODE = ("compat", "layers", "memory", "methods", "model")


@cache
def library_versions() -> dict[str, str]:
    """Return name -> version of each installed library that the forecast depends on."""
    return {name: version for name in LIBRARIES if (version := installed_version(name))}


def key_of(**inputs: Any) -> str:
    """Return a digest of the inputs, the library versions and the forecast's code."""
    text = json.dumps([inputs, library_versions(), _code_digest()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cached(key: str, result_type: Any, compute: Callable[[], Any]) -> Any:
    """Return `compute()`; after the first call, read the result from disk unless the file is damaged."""
    path = cache_dir() / "forecasts" / f"{key}.json"
    if (stored := read_object(path)) is not None:
        return from_json(result_type, stored["made"])
    computed = compute()
    with contextlib.suppress(OSError):  # a cache that can't be written only costs time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, with_checksum(json.dumps({"made": to_json(computed)})))
    return computed


@cache
def _code_digest() -> str:
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for folder in _OWN_CODE:
        for file in sorted((package / folder).glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
