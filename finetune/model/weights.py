"""Safetensors files of base models and adapters: their completeness and fingerprints."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from finetune.errors import ModelError
from finetune.files import (
    IS_LFS_POINTER,
    cache_dir,
    from_json,
    is_lfs_pointer,
    read_json,
    read_json_as,
    read_safetensors_header,
    sha256_in_subprocess,
    sha256_of,
    with_checksum,
    write_text,
)
from finetune.model.configuration import ADAPTER_CONFIG, CONFIG, DOWNLOAD_AGAIN, model_file
from finetune.settings import Settings

#: The index of a checkpoint in several files, and the weights of an adapter.
INDEX, ADAPTER_WEIGHTS = "model.safetensors.index.json", "adapter_model.safetensors"
GENERATION_CONFIG = "generation_config.json"
_HASHING_THREADS = 4
_DIGEST = re.compile("[0-9a-f]{64}")
#: Larger values are a sign of a damaged file, and PEFT would allocate memory for any rank.
_MAX_RANK, _MAX_ALPHA = 8192, 1e6
_DTYPES = {"F64", "F32", "F16", "BF16"}


def check_weights(folder: Path) -> None:
    """Raise ModelError for missing or damaged files. Reads only the headers of weights."""
    names = weight_files(folder)
    if not names:
        raise ModelError(f"{folder} has no weights (no *.safetensors)", "Save them with save_pretrained, or download them.")
    names += [name for name in (GENERATION_CONFIG, ADAPTER_CONFIG) if (folder / name).exists()]
    problems = [f"{folder / name}: {problem}" for name in names if (problem := file_problem(folder / name))]
    if problems:
        raise ModelError(problems, DOWNLOAD_AGAIN)


def weights_fingerprint(settings: Settings) -> str | None:
    """Return a hash of the weight files, or None if they are not on this disk. Raises ModelError for an unreadable file."""
    config = model_file(settings, CONFIG)
    if config is None:
        return None
    folder = config.parent
    names = weight_files(folder)
    try:
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            digests = list(pool.map(lambda name: _hash(folder / name), names))
    except OSError as error:
        raise ModelError(f"{error.filename} can't be read: {error.strerror}", DOWNLOAD_AGAIN) from None
    hashes = "".join(f"{name} {digest}\n" for name, digest in zip(names, digests, strict=True))
    return hashlib.sha256(hashes.encode()).hexdigest()


def configuration_fingerprint(settings: Settings) -> str | None:
    """Return a hash of config.json, the index and trusted code, or None without a config.json."""
    config = model_file(settings, CONFIG)
    if config is None:
        return None
    # code runs only if the recipe trusts it
    paths = [config, config.with_name(INDEX)]
    paths += sorted(config.parent.glob("*.py")) if settings.trust_remote_code else []
    hashes = "".join(f"{path.name} {sha256_of(path)}\n" for path in paths if path.is_file())
    return hashlib.sha256(hashes.encode()).hexdigest()


def generation_fingerprint(settings: Settings) -> str | None:
    """Return a hash of generation_config.json, or None."""
    path = model_file(settings, GENERATION_CONFIG)
    return sha256_of(path) if path and path.is_file() else None


def _hash(path: Path) -> str:
    path = path.resolve()
    # the hub's cache names a weight file after its SHA-256
    if _DIGEST.fullmatch(path.name):
        return path.name
    stat = path.stat()
    key = hashlib.sha256(f"{path}\n{stat.st_size}\n{stat.st_mtime_ns}\n{stat.st_ino}".encode()).hexdigest()
    cache_file = cache_dir() / "weights" / key
    # for unchanged size, time and inode; damage by a failing disk is not found
    if cached := read_json_as(cache_file, str, "sha256"):
        return cached
    digest = sha256_in_subprocess(path)
    with contextlib.suppress(OSError):  # a cache that can't be written costs only time
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        write_text(cache_file, with_checksum(json.dumps({"sha256": digest})))
    return digest


def weight_files(folder: Path) -> list[str]:
    """Return a folder's weight files, from its index if present. Raises ModelError for an unreadable index."""
    index = folder / INDEX
    if not index.is_file():
        return sorted(path.name for path in folder.glob("*.safetensors"))
    try:
        return sorted(set(from_json(dict[str, str], read_json(index, dict).get("weight_map")).values()))
    except (OSError, ValueError) as error:
        raise ModelError(f"{index} can't be read: {type(error).__name__}: {error}", DOWNLOAD_AGAIN) from None


def file_problem(path: Path) -> str:
    """Return the problem of a JSON or safetensors file; empty if none."""
    try:
        if is_lfs_pointer(path):
            return IS_LFS_POINTER
        if path.suffix == ".json":
            read_json(path, dict, may_be_edited=True)
            return ""
        with path.open("rb") as file:
            header, begin = read_safetensors_header(file)
        ends = (entry["data_offsets"][1] for entry in header.values())
        size, expected_size = path.stat().st_size, begin + max(ends, default=0)
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:
        return f"can't be read as {'JSON' if path.suffix == '.json' else 'safetensors'}: {error}"
    if size == expected_size:
        return ""
    return f"is {'truncated' if size < expected_size else 'damaged'}: {size:,} of {expected_size:,} bytes"


def adapter_problems(folder: Path) -> list[str]:
    """Return the problems of an adapter, one line each."""
    try:
        config = read_json(folder / ADAPTER_CONFIG, dict)
    except (OSError, ValueError) as error:
        return [f"{ADAPTER_CONFIG} can't be read: {error}"]
    problems = config_problems(config)
    if problem := file_problem(folder / ADAPTER_WEIGHTS):
        # without a readable header there are no tensors to check
        return [*problems, f"{ADAPTER_WEIGHTS} {problem}"]
    # safetensors only: other formats run code
    with (folder / ADAPTER_WEIGHTS).open("rb") as file:
        tensors, _ = read_safetensors_header(file)
    return problems or [problem for name, entry in tensors.items() if (problem := _tensor_problem(name, entry, config))][:5]


def config_problems(config: dict[str, Any]) -> list[str]:
    """Return the invalid values of adapter_config.json."""
    problems = []
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if rank is not None and not (type(rank) is int and 0 < rank <= _MAX_RANK):
        problems.append(f"r is {str(rank)[:40]}, not between 1 and {_MAX_RANK:,}")
    if alpha is not None and not (isinstance(alpha, (int, float)) and abs(alpha) <= _MAX_ALPHA):
        problems.append(f"lora_alpha is {str(alpha)[:40]}, not a number of at most {_MAX_ALPHA:,.0f}")
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except (re.error, RecursionError, OverflowError) as error:
            problems.append(f"target_modules {targets[:60]!r} is no regular expression: {error}")
    return problems


def _tensor_problem(name: str, entry: Any, config: dict[str, Any]) -> str:
    shape = entry["shape"]
    if entry["dtype"] not in _DTYPES:
        return f"{name} is {entry['dtype'][:40]}, not floating point"
    if not shape or not all(shape):
        return f"{name} has the shape {str(shape)[:40]}"
    pattern = config.get("rank_pattern")
    ranks = [config.get("r"), *pattern.values()] if isinstance(pattern, dict) else [config.get("r")]
    # a multiple, because an adapter of fused experts stacks the rows of all experts in one matrix
    if name.endswith("lora_A.weight") and not any(type(rank) is int and rank > 0 and shape[0] % rank == 0 for rank in ranks):
        return f"{name} has {shape[0]} rows, not a multiple of the rank {config.get('r')}"
    return ""
