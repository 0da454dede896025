"""Resolve `dataset.path`: readable local files, a bundled dataset, or a hub dataset."""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.data.readers import COMPRESSED, READERS, TABLES, Row, kind_of_file, read_file
from finetune.data.report import Refused, shown
from finetune.errors import DataError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_OTHER_SUFFIXES = (".xlsx", ".xls", ".gz", ".zip", ".zst", ".yaml", ".yml", ".md", ".pkl")


#: Files that a folder is read for; a .txt there is as often a licence as data.
_IN_FOLDERS = tuple(kind for kind in READERS if kind != ".txt")


@dataclass(frozen=True)
class Source:
    """One place with rows: a local `path`, or (path None) the `split` of the hub dataset `name`.

    `only`: of a local file with splits only `split` is read; `has_splits`: it must have them.
    `weight`: how often each of its rows is used in an epoch.
    """

    name: str
    path: Path | None = None
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    only: bool = False
    has_splits: bool = False
    weight: float = 1.0

    def rows(self) -> Iterator[Row | Refused]:
        """Its rows in order, with the unreadable ones. Raises DataError when the whole source can't be read."""
        if self.path is not None:
            return read_file(self.path, self.name, self.split if self.only else None, has_splits=self.has_splits)
        from finetune.data.hub_datasets import read_hub

        return read_hub(self.name, self.config, self.split, self.revision)


def find_sources(
    paths: str | list[str], *, side: str = "train", config: str | None = None, split: str = "train",
    revision: str | None = None, only: bool = False, has_splits: bool = False, weights: list[float] | None = None,
) -> list[Source]:  # fmt: skip
    """The sources that `paths` names, checked to exist. `side` (train, eval) chooses the file of a bundled dataset.

    `only`: the recipe names `split`, so that of local files with splits it alone is read; `has_splits`: they must have them.
    `weights`: one for each path.
    Raises DataError with the problem of every path that is missing, a directory, not readable or of an unknown kind.
    """
    sources, problems, fixes = [], [], []
    names = [paths] if isinstance(paths, str) else paths
    for text, weight in zip(names, weights or [1.0] * len(names), strict=True):
        try:
            saved = _saved(text, split if only else None)
            if saved:
                sources += [Source(shown(str(file), 200), file, weight=weight) for file in saved]
                continue
            for one in _expanded(text):
                found = replace(_find(one, side) or Source(one, None, config, split, revision), weight=weight)
                local = found.path is not None and only
                sources.append(replace(found, split=split, only=True, has_splits=has_splits) if local else found)
        except DataError as error:
            problems += error.problems
            fixes += [error.fix] if error.fix not in fixes else []
    if problems:
        raise DataError(problems, "\n".join(fixes))
    return sources


def bundled_eval(path: str | list[str]) -> list[Source]:
    """The held-out rows that belong to a bundled dataset; none for anything else."""
    return [Source(f"{path} (eval)", files["eval"])] if isinstance(path, str) and (files := _bundled(path)) else []


def _expanded(text: str) -> list[str]:
    """The data files in a folder, or those that a pattern such as data/*.jsonl names, sorted; anything else as it is."""
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - of an unknown user it stays as it is
    try:
        if path.is_dir() and not _bundled(text) and not _is_saved(path):
            found = [entry for entry in path.iterdir() if _is_data(entry)]
        elif set("*?[") & set(text) and not path.exists():
            found = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]  # noqa: PTH207
        else:
            return [text]
    except (OSError, ValueError):
        return [text]
    return sorted(map(str, found)) or [text]


def _is_data(entry: Path) -> bool:
    return entry.is_file() and kind_of_file(entry) in _IN_FOLDERS and entry.name != "dataset_info.json"


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of datasets wrote this folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _saved(text: str, split: str | None) -> list[Path]:
    """The Arrow files of a folder that `save_to_disk` wrote, in order; none for anything else.

    `split`: of a dictionary of splits this one; None where the recipe names none. Raises DataError.
    """
    folder = Path(os.path.expanduser(text))  # noqa: PTH111 - of an unknown user it stays as it is
    try:
        if not folder.is_dir() or not _is_saved(folder):
            return []
    except (OSError, ValueError):
        return []
    name = shown(text, 200)
    if (folder / "dataset_dict.json").is_file():
        splits = [one for one in _list_in(folder / "dataset_dict.json", "splits") if (folder / one / "state.json").is_file()]
        if split is None and len(splits) > 1:
            others = [one for one in splits if one != "train"]
            raise DataError(
                f"{name}: was written by save_to_disk with the splits {', '.join(map(shown, splits))}",
                f"Hold one out:  dataset.eval_split={others[0]}  or train on one alone:  dataset.split={splits[0]}",
            )
        if splits and split not in (None, *splits):
            raise DataError(
                f"{name}: has no split {shown(str(split))}; it has {', '.join(map(shown, splits))}", "Name one of them."
            )
        folder = folder / (split or splits[0]) if splits else folder
    names = [one.get("filename") for one in _list_in(folder / "state.json", "_data_files") if isinstance(one, dict)]
    files = [folder / one for one in names if isinstance(one, str) and Path(one).name == one and (folder / one).is_file()]
    if not files or len(files) != len(names):
        code = f"from datasets import load_from_disk; load_from_disk({text!r}).to_parquet('train.parquet')"
        raise DataError(
            f"{name}: was written by save_to_disk, and its state.json doesn't name its data files, or one is missing",
            f"Save it again, or where datasets reads it, write a file:  python -c {shlex.quote(code)}",
        )
    return files


def _list_in(path: Path, key: str) -> list[Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, list) else []


def is_here(text: str) -> bool:
    """Whether a path of a recipe is on this machine: a file, a folder, a pattern with files, or a bundled dataset."""
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - of an unknown user it stays as it is
    return path.exists() or bool(_bundled(text)) or _expanded(text) != [text]


def _find(text: str, side: str) -> Source | None:
    """The local or bundled source, None for a hub id. Raises DataError."""
    name = shown(text, 200)
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - of an unknown user it stays as it is
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{name}: can't be opened: {reason}", "Check the path given as dataset.path.") from None
    if mode is not None and stat.S_ISREG(mode):
        return _regular(path, name)
    if files := _bundled(text):
        return Source(text, files[side])
    if mode is not None and stat.S_ISDIR(mode):
        raise DataError(
            f"{name}: is a directory without data files",
            f"Name the file(s), or a folder with {', '.join(_IN_FOLDERS)}: {_inside(path)}",
        )
    if mode is not None:
        raise DataError(f"{name}: is not a regular file", f"Supported files end in {', '.join(READERS)}.")
    if _looks_local(path, text):
        raise DataError(f"{name}: there is no such file", _did_you_mean(path))
    if not _HUB_ID.fullmatch(text):
        raise DataError(
            f"{name}: is neither a file nor the id of a hub dataset", "Write a file's path, or an id like owner/name."
        )
    return None


def _regular(path: Path, name: str) -> Source:
    packed_table = kind_of_file(path) in TABLES and path.suffix.lower() in COMPRESSED
    if kind_of_file(path) not in READERS or packed_table:
        ending = f"ends in {shown(path.suffix)}" if path.suffix else "has no extension"
        raise DataError(
            f"{name}: {ending}, which is not supported",
            f"Supported extensions: {', '.join(READERS)}, and .gz or .zst after one of them.",
        )
    if not os.access(path, os.R_OK):
        raise DataError(f"{name}: can't be opened: Permission denied", f"Make it readable:  chmod u+r {shlex.quote(name)}")
    return Source(name, path)


def _bundled(text: str) -> dict[str, Path] | None:
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", text):
        return None
    from finetune.bundled import dataset_paths

    return dataset_paths(text)


def _looks_local(path: Path, text: str) -> bool:
    """Whether a missing path was meant as a file: by its extension, its prefix, or an existing folder."""
    known = path.suffix.lower() in (*READERS, *_OTHER_SUFFIXES) or bool(set("*?[") & set(text))
    return (
        known
        or text.startswith((".", "/", "~"))
        or "\\" in text
        or text.count("/") > 1
        or ("/" in text and path.parent.is_dir())
    )


def _did_you_mean(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"There is no folder {shown(str(folder), 200)} either; paths start from {Path.cwd()}"
    siblings = sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() in READERS)
    close = difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {', '.join(shown(str(folder / name), 200) for name in close)}?"
    return f"In {shown(str(folder), 200)} there is {', '.join(map(shown, siblings[:8])) or 'no data file'}."


def _inside(folder: Path) -> str:
    try:
        found = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        return f"(the directory can't be listed: {error.strerror})"
    return f"it has {', '.join(map(shown, found[:8])) or 'nothing'}"
