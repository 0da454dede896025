"""Resolve `dataset.path`: local files, also of a folder or pattern by their splits' names, a bundled or a hub dataset."""

from __future__ import annotations

import difflib
import glob
import hashlib
import itertools
import os
import re
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from finetune import hub
from finetune.data.pictures.source import FileStat, file_stat
from finetune.data.readers import COMPRESSED, READERS, TABLES, Row, drop_nulls, file_type, read_file
from finetune.data.report import Refused, first_line, printable
from finetune.errors import DataError, RecipeError
from finetune.files import expanded, read_object
from finetune.settings import DatasetRecipe

#: Files that a folder is read for; a .txt there is as often a licence as data.
FOLDER_TYPES = tuple(kind for kind in READERS if kind != ".txt")
#: Files of `datasets` and of the hub that describe data.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
TRAIN, VALIDATION, TEST = "train", "validation", "test"
#: Word of a file's name -> the split that it means.
_SPLIT_WORDS = {
    word: names.split()[0]
    for names in (
        "train training trainset trn", "test testing testset",
        "validation valid val dev eval evaluation devset valset evalset heldout holdout",
    )
    for word in names.split()
}  # fmt: skip
_MIXED = "several"
_LISTED_FILES = 8
_WILDCARDS = {*"*?["}


@dataclass(frozen=True)
class DataFiles:
    """The sorted data files of a folder or pattern."""

    #: The path, safe to print.
    name: str
    #: The split of each file; None where the name doesn't say.
    splits: dict[Path, str | None]

    @classmethod
    def of(cls, path_text: str) -> DataFiles | None:
        """Find the data files of a folder or pattern; None for anything else."""
        path, name = expanded(path_text), printable(path_text, 200)
        if _bundled(path_text) or _is_saved(path):
            return None
        is_pattern = bool(_WILDCARDS & {*path_text})
        try:
            if path.is_dir():
                root, files = path, _files_in(path)
            elif is_pattern and not path.exists():
                root = Path(*itertools.takewhile(_WILDCARDS.isdisjoint, path.parts))
                if "**" in path.parts and root in (Path(path.anchor), Path.home()):
                    raise DataError(f"{name}: would search all of {root}", "Name the folder with the data.")
                matches = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 - the pattern may be absolute
                files = [file for file in matches if file.is_file() and _is_named_as_data(file)]
            else:
                return None
        except (OSError, ValueError):
            return None
        splits = {file: _split_of(file.relative_to(root)) for file in sorted(files)}
        if is_pattern and {*splits.values()} == {_split_of(path.relative_to(root))}:
            splits = dict.fromkeys(splits)  # the pattern itself names the split, and asks for these files
        return cls(name, splits)

    @property
    def is_split(self) -> bool:
        """Return whether some names say that rows are not for training."""
        return bool(set(self.splits.values()) - {TRAIN, None})

    def named(self, *splits: str | None) -> list[Path]:
        return [file for file, split in self.splits.items() if split in splits]

    def of_split(self, name: str) -> list[Path]:
        """Return the files of a split. Raise DataError without files."""
        files = self.named(_SPLIT_WORDS.get(name.lower(), name))
        if not files:
            names = ", ".join(dict.fromkeys(split or "other files" for split in self.splits.values()))
            raise DataError(f"{self.name}: no file is named for {printable(name)}; it has {names}", "Name one of them.")
        return files

    def training(self) -> list[Path]:
        """Return the files to train on. Raise DataError for unclear names."""
        files, unclear = self.named(TRAIN, None), self.named(_MIXED, None)
        if self.is_split and (unclear or not files):
            problem = f"some files are named for a split, but not these: {self.names(unclear)}"
            if not files:
                problem = f"no file is named for training; it has {self.names(list(self.splits))}"
            raise DataError(f"{self.name}: {problem}", self._explicit(files or unclear or list(self.splits)))
        return files

    def names(self, files: list[Path]) -> str:
        """Name some files, with folders if there are several."""
        root = os.path.commonpath([file.parent for file in self.splits])
        more = f", ... ({len(files)} in all)" if len(files) > _LISTED_FILES else ""
        return f"{', '.join(printable(file.relative_to(root).as_posix()) for file in files[:_LISTED_FILES])}{more}"

    def _explicit(self, training: list[Path]) -> str:
        held_out = [file for file in self.named(VALIDATION) if file not in training]
        if len(training) + len(held_out) > _LISTED_FILES:
            return "Put the files into folders named train, validation and test, or name them:  'dataset.path=[FILE, FILE]'"
        values = {
            name: str(files[0]) if len(files) == 1 else f"[{', '.join(map(str, files))}]"
            for name, files in (("path", training), ("eval_path", held_out))
            if files
        }
        arguments = (shlex.quote(f"dataset.{name}={value}") for name, value in values.items())
        return f"Name the files to train on and to hold out:  {'  '.join(arguments)}"


def _files_in(folder: Path) -> list[Path]:
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    folders = [entry for entry in entries if entry.is_dir()]
    for subfolder in folders:
        # subfolders that are named for a split
        if _split_of(Path(subfolder.name, "rows")) is not None:
            entries += subfolder.iterdir()
    files = [entry for entry in entries if entry.is_file() and file_type(entry) in FOLDER_TYPES and _is_named_as_data(entry)]
    # without any file, an only subfolder
    return files if files or len(folders) != 1 else _files_in(folders[0])


def _is_named_as_data(entry: Path) -> bool:
    return not entry.name.startswith(".") and entry.name not in _DESCRIPTIONS


def _split_of(path: Path) -> str | None:
    text = re.sub(r"([a-z])([A-Z])", r"\1 \2", "/".join((*path.parts[:-1], path.name.split(".", 1)[0] or path.name)))
    stem_words = re.findall(r"[a-z]+", f"{text} {'.'.join(path.suffixes)}".lower().replace("held_out", "heldout"))
    splits = {_SPLIT_WORDS[word] for word in stem_words if word in _SPLIT_WORDS}
    return splits.pop() if len(splits) == 1 else _MIXED if splits else None


_LINE_TYPES = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt")
_UNSUPPORTED_SUFFIXES = (".xlsx", ".xls", ".gz", ".zip", ".zst", ".yaml", ".yml", ".md", ".pkl")

#: Readers of `datasets` that are allowed, out of some thirty: formats that are also read locally, never a dataset's code.
_HUB_READERS = ("json", "csv", "parquet")
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")


class FileInfo(NamedTuple):
    """A file before its rows are read."""

    stat: FileStat = None
    sha256: str = ""
    #: Approximate number of rows; None if a line is not a row.
    lines: int | None = None


@dataclass(frozen=True)
class Source:
    """Rows of a local file or a hub dataset."""

    name: str
    path: Path | None = None
    #: The split to read; None for a whole file.
    split: str | None = None
    config: str | None = None
    revision: str | None = None
    #: The local file must have splits.
    has_splits: bool = False
    #: How often each row is used in an epoch.
    weight: float = 1.0

    @cached_property
    def info(self) -> FileInfo:
        """Stat and hash the file. Raise DataError."""
        if self.path is None:
            return FileInfo()
        try:
            stat = file_stat(self.path)
            digest, lines = hashlib.sha256(), 0
            with self.path.open("rb", buffering=0) as file:
                while chunk := file.read(2**22):
                    digest.update(chunk)
                    lines += chunk.count(b"\n")
        except OSError as error:
            problem = f"{self.name}: can't be read: {error.strerror or error}"
            raise DataError(problem, "Check the file and its disk.") from None
        has_lines = self.path.suffix.lower() in _LINE_TYPES and self.split is None
        return FileInfo(stat, digest.hexdigest(), lines if has_lines else None)

    def rows(self) -> Iterator[Row | Refused]:
        """Read the rows, also unreadable ones. Raise DataError for the whole source."""
        if self.path is not None:
            return read_file(self.path, self.name, self.split, has_splits=self.has_splits)
        return read_hub(self.name, self.config, self.split or TRAIN, self.revision)


def sources_of(dataset: DatasetRecipe) -> tuple[list[Source], list[Source]]:
    """Return the training and held-out sources. Raise DataError or RecipeError."""
    _check_holdout(dataset)
    names_split = "split" in dataset.model_fields_set
    train = find_sources(
        dataset.path, dataset, split=dataset.split if names_split or dataset.eval_split else None, weights=dataset.weights
    )
    if dataset.eval_path:
        return train, find_sources(dataset.eval_path, dataset, rows="eval")
    if dataset.eval_split:
        return train, find_sources(dataset.path, dataset, split=dataset.eval_split, has_splits=True)
    if dataset.test_split_size:
        return train, []
    if isinstance(dataset.path, str) and (bundled := _bundled(dataset.path)):
        return train, [Source(f"{dataset.path} (eval)", bundled["eval"])]
    # test files are left alone
    folders = [] if names_split else _split_files(dataset.path)
    return train, [_file_source(file) for files in folders for file in files.named(VALIDATION)]


def _check_holdout(dataset: DatasetRecipe) -> None:
    size = dataset.test_split_size
    options = [name for name in ("eval_path", "eval_split", "test_split_size") if getattr(dataset, name)]
    if len(options) > 1:
        raise RecipeError(f"dataset.{options[0]} and dataset.{options[1]} both choose the held-out rows", "Keep one of them.")
    paths = [dataset.path] if isinstance(dataset.path, str) else dataset.path
    if dataset.weights and len(dataset.weights) != len(paths):
        raise RecipeError(
            f"dataset.weights has {len(dataset.weights)} number(s) for {len(paths)} path(s)",
            "Give one for each path, in order.",
        )
    if size is not None and size >= 1 and size != int(size):
        raise RecipeError(f"dataset.test_split_size is {size}; it must be a fraction below 1 or a whole number of rows")


def split_notes(dataset: DatasetRecipe, training: list[Source], held_out: list[Source]) -> list[str]:
    """Describe which files of each folder or pattern are trained on, held out and not read."""
    trained, evaluated = ({source.path for source in sources if source.path} for sources in (training, held_out))
    notes = []
    for files in _split_files(dataset.path):
        uses = {"to train on": trained, "held out": evaluated, "not read": {*files.splits} - trained - evaluated}
        named = {use: files.names([file for file in files.splits if file in paths]) for use, paths in uses.items()}
        parts = [f"{names} {use}" for use, names in named.items() if names]
        notes.append(f"files of {files.name} are used by name: {'; '.join(parts)}")
    return notes


def find_sources(
    paths: str | list[str], dataset: DatasetRecipe, *, rows: str = TRAIN, split: str | None = None, has_splits: bool = False,
    weights: list[float] | None = None,
) -> list[Source]:  # fmt: skip
    """Find and check the sources of `paths`. Raise DataError with every problem."""
    # `rows` (train, eval): which rows of a bundled dataset or a folder
    sources, problems, fixes = [], [], []
    path_list = [paths] if isinstance(paths, str) else paths
    for path, weight in zip(path_list, weights or [1.0] * len(path_list), strict=True):
        try:
            hub_source = Source(path, None, split or dataset.split, dataset.name, dataset.revision)
            path_sources = _local_sources(path, rows, split, has_splits) or [hub_source]
            sources += [replace(source, weight=weight) for source in path_sources]
        except DataError as error:
            problems += error.problems
            fixes += [error.fix] if error.fix not in fixes else []
    if problems:
        raise DataError(problems, "\n".join(fixes))
    return sources


def _split_files(paths: str | list[str]) -> list[DataFiles]:
    folders = map(DataFiles.of, [paths] if isinstance(paths, str) else paths)
    return [files for files in folders if files is not None and files.is_split]


def _local_sources(path_text: str, rows: str, split: str | None, has_splits: bool) -> list[Source]:
    """Return the sources of a local path, none for a hub id."""
    if arrow_files := _saved_arrow_files(path_text, split):
        return list(map(_file_source, arrow_files))
    files = DataFiles.of(path_text)
    if files is None or not files.splits:
        local_sources = _local_source(path_text, rows)
    elif split is not None and files.is_split:
        return list(map(_file_source, files.of_split(split)))
    else:  # for eval the whole path is held out
        held_out = files.named(VALIDATION) or files.named(TEST) or files.splits
        local_sources = list(map(_file_source, files.training() if rows == TRAIN else held_out))
    return [replace(source, split=split, has_splits=has_splits) for source in local_sources]


def _is_saved(folder: Path) -> bool:
    # unlike a Path's method, isfile raises nothing
    return any(os.path.isfile(folder / name) for name in ("state.json", "dataset_dict.json"))  # noqa: PTH113


def _saved_arrow_files(path_text: str, split: str | None) -> list[Path]:
    folder = expanded(path_text)
    if not _is_saved(folder):
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
            listing = ", ".join(map(printable, splits))
            raise DataError(f"{label}: has no split {printable(str(split))}; it has {listing}", "Name one of them.")
        folder = folder / (split or splits[0]) if splits else folder
    # `save_to_disk` lists its data files in order
    names = [entry.get("filename") for entry in _json_list(folder / "state.json", "_data_files") if isinstance(entry, dict)]
    files = [folder / name for name in names if isinstance(name, str) and Path(name).name == name and (folder / name).is_file()]
    if not files or len(files) != len(names):
        code = f"from datasets import load_from_disk; load_from_disk({path_text!r}).to_parquet('train.parquet')"
        raise DataError(
            f"{label}: was written by save_to_disk, but its state.json names no data files, or one is missing",
            f"Save it again, or, if datasets can load the folder, convert it to a file:  python -c {shlex.quote(code)}",
        )
    return files


def _json_list(path: Path, key: str) -> list[Any]:
    items = (read_object(path) or {}).get(key)
    return items if isinstance(items, list) else []


def is_local(text: str) -> bool:
    """Return whether a path exists on this machine."""
    path = expanded(text)
    return path.exists() or bool(_bundled(text)) or bool((files := DataFiles.of(text)) and files.splits)


def _local_source(path_text: str, rows: str) -> list[Source]:
    name, path = printable(path_text, 200), expanded(path_text)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    except (OSError, ValueError) as error:
        problem = f"{name}: can't be opened: {getattr(error, 'strerror', None) or error}"
        raise DataError(problem, "Check the path given as dataset.path.") from None
    if mode is not None and stat.S_ISREG(mode):
        return [_file_source(path, name)]
    if files := _bundled(path_text):
        return [Source(path_text, files[rows])]
    if mode is None:
        require_path_or_id(path_text)
        if _looks_local(path, path_text):
            raise DataError(f"{name}: there is no such file", _path_hint(path))
        return []
    if not stat.S_ISDIR(mode):
        raise DataError(f"{name}: is not a regular file", f"Supported files end in {', '.join(READERS)}.")
    try:
        content = f"it has {', '.join(map(printable, sorted(entry.name for entry in path.iterdir())[:8])) or 'nothing'}"
    except OSError as error:
        content = f"(the directory can't be listed: {error.strerror})"
    raise DataError(
        f"{name}: is a directory without data files",
        f"Name the file(s), or a folder with {', '.join(FOLDER_TYPES)}: {content}",
    )


def require_path_or_id(path_text: str) -> None:
    """Raise DataError for text that is neither a path nor a hub id."""
    name = printable(path_text, 200)
    if _ADDRESS.match(path_text):
        raise DataError(f"{name}: is a URL, which is not supported", "Download it, and give the file's path.")
    # the path may be of another machine
    if not (_looks_local(Path(path_text), path_text) or hub.HUB_ID.fullmatch(path_text)):
        raise DataError(
            f"{name}: is neither a file nor the id of a hub dataset", "Write a file's path, or an id like owner/name."
        )


def _file_source(path: Path, name: str = "") -> Source:
    name = name or printable(str(path), 200)
    if path.suffix.lower() == ".zip":
        raise DataError(
            f"{name}: is a zip file, which is not supported",
            f"Unpack it:  unzip {shlex.quote(name)} -d {shlex.quote(path.stem)}  and use  "
            + shlex.quote(f"dataset.path={path.stem}"),
        )
    if file_type(path) not in READERS or (file_type(path) in TABLES and path.suffix.lower() in COMPRESSED):
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
    return (
        path.suffix.lower() in (*READERS, *_UNSUPPORTED_SUFFIXES)
        or any(character in path_text for character in "*?[\\")
        or path_text.startswith((".", "/", "~"))
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
    label = "this folder" if str(folder) == "." else printable(str(folder), 200)
    return f"In {label} there is {', '.join(map(printable, siblings[:8])) or 'no data file'}."


def read_hub(name: str, config: str | None, split: str, revision: str | None) -> Iterator[Row | Refused]:
    """Read the rows of one split, numbered from 1. Raise DataError."""
    from datasets import load_dataset_builder
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    hub.is_reachable()
    try:
        builder = load_dataset_builder(name, config, revision=revision)
        kind = type(builder).__module__.removeprefix("datasets.packaged_modules.").split(".")[0]
        if kind not in _HUB_READERS:
            raise DataError(
                f"{name}: is a dataset of kind {printable(kind)}, which is not supported",
                f"Supported kinds: {', '.join(_HUB_READERS)}.",
            )
        builder.download_and_prepare()
        # images are checked before anything is decoded
        rows = builder.as_dataset(split=split).to_iterable_dataset().decode(False)
    except DatasetNotFoundError as error:
        raise DataError(
            f"{name}: there is no such file, bundled dataset or dataset on the hub ({first_line(error)})",
            "Check the spelling; for a private or gated dataset run  hf auth login",
        ) from None
    except ConnectionError as error:
        raise DataError(
            f"{name}: is not a local file, and the hub can't be reached: {first_line(error)}",
            "Check the path or the network. For a dataset downloaded earlier set  HF_HUB_OFFLINE=1",
        ) from None
    except (DatasetsError, OSError, ValueError) as error:
        fix = "Look at the dataset's page on the hub, or download its files and give their path."
        if "split" in str(error):
            fix = "Name a split with dataset.split, for example  dataset.split=train"
        elif "onfig" in str(error):
            fix = "Name a configuration with dataset.name."
        raise DataError(f"{name}: can't be loaded from the hub: {first_line(error)}", fix) from None
    for number, row in enumerate(rows, 1):
        yield Row(f"{name}:{split}", number, {key: drop_nulls(value) for key, value in row.items()})
