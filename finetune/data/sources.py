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

from finetune.data.readers import COMPRESSED, READERS, TABLES, Row, file_type, read_file
from finetune.data.report import Refused, printable
from finetune.errors import DataError
from finetune.hub import HUB_ID

_UNSUPPORTED_SUFFIXES = (".xlsx", ".xls", ".gz", ".zip", ".zst", ".yaml", ".yml", ".md", ".pkl")


#: Files that a folder is read for; a .txt there is as often a licence as data.
_FOLDER_TYPES = tuple(kind for kind in READERS if kind != ".txt")


@dataclass(frozen=True)
class Source:
    """Rows of a local `path`, or (path None) of the `split` of the hub dataset `name`.

    `only_split`: of a local file with splits only `split` is read; `has_splits`: it must have them.
    `weight`: how often each of its rows is used in an epoch.
    """

    name: str
    path: Path | None = None
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    only_split: bool = False
    has_splits: bool = False
    weight: float = 1.0

    def rows(self) -> Iterator[Row | Refused]:
        """Its rows in order, with the unreadable ones. Raises DataError when the whole source can't be read."""
        if self.path is not None:
            return read_file(self.path, self.name, self.split if self.only_split else None, has_splits=self.has_splits)
        from finetune.data.hub_datasets import read_hub

        return read_hub(self.name, self.config, self.split, self.revision)


def find_sources(
    paths: str | list[str], *, bundled: str = "train", config: str | None = None, split: str = "train",
    revision: str | None = None, only_split: bool = False, has_splits: bool = False, weights: list[float] | None = None,
) -> list[Source]:  # fmt: skip
    """The sources that `paths` names, checked to exist. `bundled` (train, eval): which one of a bundled dataset.

    `only_split`: the recipe names `split`, so of local files with splits only it is read; `has_splits`: they must have them.
    `weights`: one for each path.
    Raises DataError with the problem of every path that is missing, a directory, not readable or of an unknown kind.
    """
    sources, problems, fixes = [], [], []
    path_list = [paths] if isinstance(paths, str) else paths
    for path, weight in zip(path_list, weights or [1.0] * len(path_list), strict=True):
        try:
            arrow_files = _saved_arrow_files(path, split if only_split else None)
            if arrow_files:
                sources += [Source(printable(str(file), 200), file, weight=weight) for file in arrow_files]
                continue
            for name in _expand_path(path):
                source = replace(_local_source(name, bundled) or Source(name, None, config, split, revision), weight=weight)
                if source.path is not None and only_split:
                    source = replace(source, split=split, only_split=True, has_splits=has_splits)
                sources.append(source)
        except DataError as error:
            problems += error.problems
            fixes += [error.fix] if error.fix not in fixes else []
    if problems:
        raise DataError(problems, "\n".join(fixes))
    return sources


def bundled_eval(path: str | list[str]) -> list[Source]:
    """The held-out rows that belong to a bundled dataset; none for anything else."""
    return [Source(f"{path} (eval)", files["eval"])] if isinstance(path, str) and (files := _bundled(path)) else []


def _expand_path(pattern: str) -> list[str]:
    """The data files in a folder, or those that match a pattern such as data/*.jsonl, sorted; anything else unchanged."""
    path = Path(os.path.expanduser(pattern))  # noqa: PTH111 - of an unknown user it stays as it is
    try:
        if path.is_dir() and not _bundled(pattern) and not _is_saved(path):
            files = [entry for entry in path.iterdir() if _is_data(entry)]
        elif set("*?[") & set(pattern) and not path.exists():
            files = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]  # noqa: PTH207
        else:
            return [pattern]
    except (OSError, ValueError):
        return [pattern]
    return sorted(map(str, files)) or [pattern]


def _is_data(entry: Path) -> bool:
    return entry.is_file() and file_type(entry) in _FOLDER_TYPES and entry.name != "dataset_info.json"


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of datasets wrote this folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _saved_arrow_files(path_text: str, split: str | None) -> list[Path]:
    """The Arrow files of a folder that `save_to_disk` wrote, in order; empty for anything else.

    `split`: the split to use if the folder has several; None if the recipe names none. Raises DataError.
    """
    folder = Path(os.path.expanduser(path_text))  # noqa: PTH111 - of an unknown user it stays as it is
    try:
        if not folder.is_dir() or not _is_saved(folder):
            return []
    except (OSError, ValueError):
        return []
    label = printable(path_text, 200)
    if (folder / "dataset_dict.json").is_file():
        names = _json_list(folder / "dataset_dict.json", "splits")
        splits = [name for name in names if (folder / name / "state.json").is_file()]
        if split is None and len(splits) > 1:
            others = [name for name in splits if name != "train"]
            raise DataError(
                f"{label}: was written by save_to_disk with the splits {', '.join(map(printable, splits))}",
                f"Hold one out:  dataset.eval_split={others[0]}  or train on one alone:  dataset.split={splits[0]}",
            )
        if splits and split not in (None, *splits):
            raise DataError(
                f"{label}: has no split {printable(str(split))}; it has {', '.join(map(printable, splits))}",
                "Name one of them.",
            )
        folder = folder / (split or splits[0]) if splits else folder
    names = [entry.get("filename") for entry in _json_list(folder / "state.json", "_data_files") if isinstance(entry, dict)]
    files = [folder / name for name in names if isinstance(name, str) and Path(name).name == name and (folder / name).is_file()]
    if not files or len(files) != len(names):
        code = f"from datasets import load_from_disk; load_from_disk({path_text!r}).to_parquet('train.parquet')"
        raise DataError(
            f"{label}: was written by save_to_disk, and its state.json doesn't name its data files, or one is missing",
            f"Save it again, or where datasets reads it, write a file:  python -c {shlex.quote(code)}",
        )
    return files


def _json_list(path: Path, key: str) -> list[Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    items = content.get(key) if isinstance(content, dict) else None
    return items if isinstance(items, list) else []


def is_local(text: str) -> bool:
    """Whether a recipe's path exists on this machine: a file, a folder, a pattern with files, or a bundled dataset."""
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - of an unknown user it stays as it is
    return path.exists() or bool(_bundled(text)) or _expand_path(text) != [text]


def _local_source(path_text: str, bundled: str) -> Source | None:
    """The local or bundled source, None for a hub id. Raises DataError."""
    name = printable(path_text, 200)
    path = Path(os.path.expanduser(path_text))  # noqa: PTH111 - of an unknown user it stays as it is
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{name}: can't be opened: {reason}", "Check the path given as dataset.path.") from None
    if mode is not None and stat.S_ISREG(mode):
        return _file_source(path, name)
    if files := _bundled(path_text):
        return Source(path_text, files[bundled])
    if mode is not None and stat.S_ISDIR(mode):
        raise DataError(
            f"{name}: is a directory without data files",
            f"Name the file(s), or a folder with {', '.join(_FOLDER_TYPES)}: {_folder_content(path)}",
        )
    if mode is not None:
        raise DataError(f"{name}: is not a regular file", f"Supported files end in {', '.join(READERS)}.")
    if _looks_local(path, path_text):
        raise DataError(f"{name}: there is no such file", _path_hint(path))
    if not HUB_ID.fullmatch(path_text):
        raise DataError(
            f"{name}: is neither a file nor the id of a hub dataset", "Write a file's path, or an id like owner/name."
        )
    return None


def _file_source(path: Path, name: str) -> Source:
    is_compressed_table = file_type(path) in TABLES and path.suffix.lower() in COMPRESSED
    if file_type(path) not in READERS or is_compressed_table:
        problem = f"ends in {printable(path.suffix)}" if path.suffix else "has no extension"
        raise DataError(
            f"{name}: {problem}, which is not supported",
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


def _looks_local(path: Path, path_text: str) -> bool:
    """Whether a missing path was meant as a file: by its extension, its prefix, or an existing folder."""
    has_data_suffix = path.suffix.lower() in (*READERS, *_UNSUPPORTED_SUFFIXES) or bool(set("*?[") & set(path_text))
    return (
        has_data_suffix
        or path_text.startswith((".", "/", "~"))
        or "\\" in path_text
        or path_text.count("/") > 1
        or ("/" in path_text and path.parent.is_dir())
    )


def _path_hint(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"There is no folder {printable(str(folder), 200)} either; paths start from {Path.cwd()}"
    siblings = sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() in READERS)
    similar = difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.5)
    if similar:
        return f"Did you mean {', '.join(printable(str(folder / name), 200) for name in similar)}?"
    return f"In {printable(str(folder), 200)} there is {', '.join(map(printable, siblings[:8])) or 'no data file'}."


def _folder_content(folder: Path) -> str:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        return f"(the directory can't be listed: {error.strerror})"
    return f"it has {', '.join(map(printable, names[:8])) or 'nothing'}"
