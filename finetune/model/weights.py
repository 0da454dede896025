"""Checks that a folder's safetensors files are complete before a run starts; only their headers are read."""

from __future__ import annotations

import json
from pathlib import Path

from finetune.errors import RecipeError

_AGAIN = "Download the weights again, or give another folder. (Files of git-lfs: git lfs pull)"


def check_weights(folder: Path) -> None:
    """Raise RecipeError naming every weight file that is missing, truncated or no safetensors file."""
    names = _files(folder)
    if not names:
        raise RecipeError(f"{folder} has no weights (no *.safetensors)", "Save them with save_pretrained, or download them.")
    problems = [f"{folder / name}: {problem}" for name in names if (problem := _problem(folder / name))]
    if problems:
        raise RecipeError(problems, _AGAIN)


def _files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(path.name for path in folder.glob("*.safetensors"))
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(f"{index} can't be read: {type(error).__name__}: {error}", _AGAIN) from None


def _problem(path: Path) -> str:
    """What is wrong with a file; empty when it is as long as its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            beginning = file.read(8)
            length = int.from_bytes(beginning, "little")
            if beginning == b"version ":
                return "is a pointer of git-lfs, not the file"
            if len(beginning) < 8 or length > size - 8:
                return f"is truncated or no safetensors file ({size:,} bytes)"
            header = json.loads(file.read(length))
        data = max((part["data_offsets"][1] for name, part in header.items() if name != "__metadata__"), default=0)
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"can't be read as safetensors: {error}"
    return f"is truncated: {size:,} of {8 + length + data:,} bytes" if size < 8 + length + data else ""
