"""Checks of an adapter's folder before a library reads it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from finetune.files import read_json, read_safetensors_header
from finetune.model.configuration import ADAPTER_CONFIG
from finetune.model.weights import ADAPTER_WEIGHTS, file_problem

#: Ranks and scales beyond these are a damaged file: PEFT would reserve memory for any rank.
_MAX_RANK, _MAX_ALPHA = 8192, 1e6
_DTYPES = {"F64", "F32", "F16", "BF16"}


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
        tensors = {name: entry for name, entry in read_safetensors_header(file)[0].items() if name != "__metadata__"}
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
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    # fused experts stack every expert's rows in one matrix: a multiple of the rank
    if name.endswith("lora_A.weight") and not any(type(rank) is int and rank > 0 and shape[0] % rank == 0 for rank in ranks):
        return f"{name} has {shape[0]} rows, not a multiple of the rank {config.get('r')}"
    return ""
