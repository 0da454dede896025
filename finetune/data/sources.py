"""Find the rows that `dataset.path` names: local files, folders or patterns, bundled datasets, and hub datasets."""

from __future__ import annotations

import contextlib
import difflib
import glob
import hashlib
import itertools
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from finetune import hub
from finetune.bundled import dataset_paths
from finetune.data.pictures.source import FileStat, file_stat
from finetune.data.readers import COMPRESSED, READERS, TABLES, Row, drop_nulls, file_type, read_file
from finetune.data.report import Refused, first_line, printable
from finetune.errors import DataError, RecipeError
from finetune.files import expanded, read_object
from finetune.settings import DatasetRecipe

#: File types that are read from a folder. A .txt file in a folder is as often a licence as data.
FOLDER_TYPES = tuple(extension for extension in READERS if extension != ".txt")
#: Files that `datasets` and the hub write beside the data.
_METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
TRAIN, VALIDATION, TEST = "train", "validation", "test"
#: Word in a file's name -> split.
_SPLIT_WORDS = {
    word: names.split()[0]
    for names in (
        "train training trainset trn", "test testing testset",
        "validation valid val dev eval evaluation devset valset evalset heldout holdout",
    )
    for word in names.split()
}  # fmt: skip
_SEVERAL_SPLITS = "several"  # the split of a file whose name has words of several splits, such as train_test.csv
_MAX_LISTED = 8  # most names that a message lists
_WILDCARDS = set("*?[")


@dataclass(frozen=True)
class DataFiles:
    """The sorted data files of a folder or pattern."""

    name: str  # the folder or pattern, safe to print
    splits: dict[Path, str | None]  # file -> the split that its name says; None if it says none

    @classmethod
    def find(cls, path_text: str) -> DataFiles | None:
        """Find the data files of a folder or pattern; None without such files."""
        path, name = expanded(path_text), printable(path_text, 200)
        if dataset_paths(path_text) or _is_saved_dataset(path):
            return None
        is_pattern = not _WILDCARDS.isdisjoint(path_text)
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
            # the pattern itself names the split, as in data/test-*.jsonl: read the files for any purpose
            splits = dict.fromkeys(splits)
        return cls(name, splits) if splits else None

    @property
    def is_split(self) -> bool:
        """Return whether a file's name says that it is not for training."""
        return not {TRAIN, None}.issuperset(self.splits.values())

    def with_split(self, *splits: str | None) -> list[Path]:
        return [file for file, split in self.splits.items() if split in splits]

    def training_files(self) -> list[Path]:
        """Return the files to train on. Raise DataError for unclear names."""
        files, unclear = self.with_split(TRAIN, None), self.with_split(_SEVERAL_SPLITS, None)
        if self.is_split and (unclear or not files):
            problem = f"some files are named for a split, but not these: {self.listing(unclear)}"
            if not files:
                problem = f"no file is named for training; it has {self.listing(list(self.splits))}"
            fix = "Put the files into folders named train, validation and test, or name them (dataset.path, dataset.eval_path)."
            raise DataError(f"{self.name}: {problem}", fix)
        return files

    def listing(self, files: list[Path]) -> str:
        """List the first files for a message, with their folders if there are several."""
        root = os.path.commonpath([file.parent for file in self.splits])
        names = [printable(file.relative_to(root).as_posix()) for file in files[:_MAX_LISTED]]
        return ", ".join(names) + (f", ... ({len(files)} in all)" if len(files) > _MAX_LISTED else "")


def _files_in(folder: Path) -> list[Path]:
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    folders = [entry for entry in entries if entry.is_dir()]
    for subfolder in folders:
        # a path with any file name, so that only the folder's name can say the split
        if _split_of(Path(subfolder.name, "rows")) is not None:
            entries += subfolder.iterdir()
    files = [entry for entry in entries if entry.is_file() and file_type(entry) in FOLDER_TYPES and _is_named_as_data(entry)]
    # a folder without data files may hold them in its only subfolder
    return files if files or len(folders) != 1 else _files_in(folders[0])


def _is_named_as_data(file: Path) -> bool:
    return not file.name.startswith(".") and file.name not in _METADATA_FILES


def _split_of(path: Path) -> str | None:
    spaced_path = re.sub(r"([a-z])([A-Z])", r"\1 \2", path.as_posix())  # myTrain is two words
    name_words = re.findall(r"[a-z]+", spaced_path.lower().replace("held_out", "heldout"))
    splits = {_SPLIT_WORDS[word] for word in name_words if word in _SPLIT_WORDS}
    if len(splits) > 1:
        return _SEVERAL_SPLITS
    return splits.pop() if splits else None


_LINE_TYPES = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt")  # file types with a row per line
_UNSUPPORTED_SUFFIXES = (".xlsx", ".xls", ".gz", ".zip", ".zst", ".yaml", ".yml", ".md", ".pkl")
#: The allowed builders of `datasets`: formats that are also read locally.
_HUB_BUILDERS = ("json", "csv", "parquet")


class FileInfo(NamedTuple):
    """Facts of a file that are read before its rows."""

    stat: FileStat = None
    sha256: str = ""
    line_count: int | None = None  # approximate number of rows; None for a type without a row per line


@dataclass(frozen=True)
class Source:
    """Rows of a local file or a hub dataset."""

    name: str
    path: Path | None = None
    split: str | None = None  # the split to read; None for a whole file
    config: str | None = None
    revision: str | None = None

    @cached_property
    def info(self) -> FileInfo:
        """Stat and hash the file. Raise DataError."""
        if self.path is None:
            return FileInfo()
        try:
            stat = file_stat(self.path)
            digest, line_count = hashlib.sha256(), 0
            with self.path.open("rb", buffering=0) as file:
                while chunk := file.read(2**22):
                    digest.update(chunk)
                    line_count += chunk.count(b"\n")
        except OSError as error:
            problem = f"{self.name}: can't be read: {error.strerror or error}"
            raise DataError(problem, "Check the file and its disk.") from None
        has_lines = self.path.suffix.lower() in _LINE_TYPES and self.split is None
        return FileInfo(stat, digest.hexdigest(), line_count if has_lines else None)

    def rows(self) -> Iterator[Row | Refused]:
        """Yield each row, or why it is unreadable. Raise DataError for an unreadable source."""
        if self.path is not None:
            return read_file(self.path, self.name, self.split)
        return read_hub(self.name, self.config, self.split or TRAIN, self.revision)


def sources_of(dataset: DatasetRecipe) -> tuple[list[Source], list[Source]]:
    """Return the training and held-out sources. Raise DataError or RecipeError."""
    size = dataset.test_split_size
    options = [name for name in ("eval_path", "eval_split", "test_split_size") if getattr(dataset, name)]
    if len(options) > 1:
        raise RecipeError(f"dataset.{options[0]} and dataset.{options[1]} both choose the held-out rows", "Keep one of them.")
    if size is not None and size >= 1 and size != int(size):
        raise RecipeError(f"dataset.test_split_size is {size}; it must be a fraction below 1 or a whole number of rows")
    names_split = "split" in dataset.model_fields_set
    split = dataset.split if names_split or dataset.eval_split else None  # without either setting, files are read whole
    train = find_sources(dataset.path, dataset, split=split)
    if dataset.eval_path:
        return train, find_sources(dataset.eval_path, dataset, purpose="eval")
    if dataset.eval_split:
        return train, find_sources(dataset.path, dataset, split=dataset.eval_split)
    if size:
        return train, []
    if isinstance(dataset.path, str) and (bundled := dataset_paths(dataset.path)):
        return train, [Source(f"{dataset.path} (eval)", bundled["eval"])]
    folders = [] if names_split else _split_folders(dataset.path)  # files named for testing are not read
    return train, [_file_source(file) for files in folders for file in files.with_split(VALIDATION)]


def split_notes(dataset: DatasetRecipe, train: list[Source], held_out: list[Source]) -> list[str]:
    """Describe which files of each folder or pattern are trained on, held out and not read."""
    train_paths = {source.path for source in train if source.path}
    held_out_paths = {source.path for source in held_out if source.path}
    notes = []
    for files in _split_folders(dataset.path):
        unread_paths = {*files.splits} - train_paths - held_out_paths
        paths_by_use = {"to train on": train_paths, "held out": held_out_paths, "not read": unread_paths}
        uses = []
        for use, paths in paths_by_use.items():
            if listing := files.listing([file for file in files.splits if file in paths]):
                uses.append(f"{listing} {use}")
        notes.append(f"files of {files.name} are used by name: {'; '.join(uses)}")
    return notes


def find_sources(
    paths: str | list[str], dataset: DatasetRecipe, *, purpose: str = TRAIN, split: str | None = None,
) -> list[Source]:  # fmt: skip
    """Find and check the sources of `paths`; `purpose` is train or eval. Raise DataError with every problem."""
    sources, problems, fixes = [], [], []
    for path in [paths] if isinstance(paths, str) else paths:
        try:
            hub_source = Source(path, split=split or dataset.split, config=dataset.name, revision=dataset.revision)
            sources += _local_sources(path, purpose, split) or [hub_source]
        except DataError as error:
            problems += error.problems
            if error.fix not in fixes:
                fixes.append(error.fix)
    if problems:
        raise DataError(problems, "\n".join(fixes))
    return sources


def _split_folders(paths: str | list[str]) -> list[DataFiles]:
    folders = map(DataFiles.find, [paths] if isinstance(paths, str) else paths)
    return [files for files in folders if files is not None and files.is_split]


def _local_sources(path_text: str, purpose: str, split: str | None) -> list[Source]:
    if arrow_files := _saved_arrow_files(path_text, split):
        return list(map(_file_source, arrow_files))
    files = DataFiles.find(path_text)
    if files is None:
        local_sources = _file_or_bundled(path_text, purpose)
    elif split is not None and files.is_split:
        if split_files := files.with_split(_SPLIT_WORDS.get(split.lower(), split)):
            return list(map(_file_source, split_files))
        names = ", ".join(dict.fromkeys(name or "other files" for name in files.splits.values()))
        raise DataError(f"{files.name}: no file is named for {printable(split)}; it has {names}", "Name one of them.")
    else:  # eval_path may name a folder with all splits, or with held-out files alone
        held_out = files.with_split(VALIDATION) or files.with_split(TEST) or files.splits
        local_sources = list(map(_file_source, files.training_files() if purpose == TRAIN else held_out))
    return [replace(source, split=split) for source in local_sources]


def _is_saved_dataset(folder: Path) -> bool:
    # unlike Path.is_file, isfile raises nothing, for example for names that are too long
    return any(os.path.isfile(folder / name) for name in ("state.json", "dataset_dict.json"))  # noqa: PTH113


def _saved_arrow_files(path_text: str, split: str | None) -> list[Path]:
    folder = expanded(path_text)
    if not _is_saved_dataset(folder):
        return []
    label = printable(path_text, 200)
    if (folder / "dataset_dict.json").is_file():
        split_names = [name for name in _json_list(folder / "dataset_dict.json", "splits") if isinstance(name, str)]
        splits = [name for name in dict.fromkeys(split_names) if (folder / name / "state.json").is_file()]
        listing = ", ".join(map(printable, splits))
        if split is None and len(splits) > 1:
            others = [name for name in splits if name != "train"]
            problem = f"{label}: was written by save_to_disk with the splits {listing}"
            fix = f"Hold one out:  dataset.eval_split={others[0]}  or train on one alone:  dataset.split={splits[0]}"
            raise DataError(problem, fix)
        if splits and split not in (None, *splits):
            raise DataError(f"{label}: has no split {printable(str(split))}; it has {listing}", "Name one of them.")
        if splits:
            folder /= split or splits[0]
    # `save_to_disk` lists its data files in order
    names = [entry.get("filename") for entry in _json_list(folder / "state.json", "_data_files") if isinstance(entry, dict)]
    # a name with folders could lead out of this folder
    files = [folder / name for name in names if isinstance(name, str) and Path(name).name == name and (folder / name).is_file()]
    if not files or len(files) != len(names):
        code = f"from datasets import load_from_disk; load_from_disk({path_text!r}).to_parquet('train.parquet')"
        problem = f"{label}: was written by save_to_disk, but its state.json names no data files, or one is missing"
        fix = f"Save it again, or, if datasets can load the folder, convert it to a file:  python -c {shlex.quote(code)}"
        raise DataError(problem, fix)
    return files


def _json_list(path: Path, key: str) -> list[Any]:
    items = (read_object(path) or {}).get(key)
    return items if isinstance(items, list) else []


def is_local(text: str) -> bool:
    """Return whether a file, a folder, a pattern's files or a bundled dataset is on this machine."""
    # unlike Path.exists, os.path.exists raises nothing for names that are too long
    return os.path.exists(expanded(text)) or bool(dataset_paths(text)) or DataFiles.find(text) is not None  # noqa: PTH110


def _file_or_bundled(path_text: str, purpose: str) -> list[Source]:
    name, path = printable(path_text, 200), expanded(path_text)
    # unlike Path.is_file, os.path.isfile raises nothing for names that no file can have
    if os.path.isfile(path):  # noqa: PTH113
        return [_file_source(path, name)]
    if bundled := dataset_paths(path_text):
        return [Source(path_text, bundled[purpose])]
    if os.path.isdir(path):  # noqa: PTH112
        raise DataError(f"{name}: is a directory without data files", f"Name a folder with {', '.join(FOLDER_TYPES)}.")
    require_path_or_id(path_text)
    if hub.HUB_ID.fullmatch(path_text) and path.suffix.lower() not in (*READERS, *_UNSUPPORTED_SUFFIXES):
        return []
    folder, siblings = path.parent, list[str]()
    with contextlib.suppress(OSError, ValueError):  # missing or not readable, or a name that no folder can have
        siblings = os.listdir(folder)  # noqa: PTH208
    similar = [printable(str(folder / sibling), 200) for sibling in difflib.get_close_matches(path.name, siblings)]
    hint = f"Did you mean {', '.join(similar)}? " if similar else ""
    raise DataError(f"{name}: there is no such file, or it can't be read", f"{hint}Paths start from {Path.cwd()}")


def require_path_or_id(path_text: str) -> None:
    """Raise DataError for text that is neither a path nor a hub id."""
    name = printable(path_text, 200)
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", path_text):
        raise DataError(f"{name}: is a URL", "Download it, and give the file's path.")
    # the file may be on another machine, so only the text is checked
    if not (hub.HUB_ID.fullmatch(path_text) or Path(path_text).suffix or not set("/\\*?[").isdisjoint(path_text)):
        raise DataError(f"{name}: there is no such file", "Write a file's path, or an id like owner/name.")


def _file_source(path: Path, name: str = "") -> Source:
    name = name or printable(str(path), 200)
    if file_type(path) not in READERS or (file_type(path) in TABLES and path.suffix.lower() in COMPRESSED):
        ending = f"ends in {printable(path.suffix)}" if path.suffix else "has no extension"
        problem = f"{name}: {ending}, which is not supported"
        raise DataError(problem, f"Unpack archives. Supported: {', '.join(READERS)}, and .gz or .zst after one of them.")
    if not os.access(path, os.R_OK):
        raise DataError(f"{name}: can't be opened: Permission denied", f"Make it readable:  chmod u+r {shlex.quote(name)}")
    return Source(name, path)


def read_hub(name: str, config: str | None, split: str, revision: str | None) -> Iterator[Row | Refused]:
    """Read the rows of one split, numbered from 1. Raise DataError."""
    from datasets import load_dataset_builder
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    hub.is_reachable()  # without a network this makes `datasets` read its cache
    try:
        builder = load_dataset_builder(name, config, revision=revision)
        kind = type(builder).__module__.removeprefix("datasets.packaged_modules.").split(".")[0]
        if kind not in _HUB_BUILDERS:
            problem = f"{name}: is a dataset of kind {printable(kind)}, which is not supported"
            raise DataError(problem, f"Supported kinds: {', '.join(_HUB_BUILDERS)}.")
        builder.download_and_prepare()
        # decode(False): an image is checked before it is decoded
        rows = builder.as_dataset(split=split).to_iterable_dataset().decode(False)
    except DatasetNotFoundError as error:
        problem = f"{name}: there is no such file, bundled dataset or dataset on the hub ({first_line(error)})"
        raise DataError(problem, "Check the spelling; for a private or gated dataset run  hf auth login") from None
    except ConnectionError as error:
        problem = f"{name}: is not a local file, and the hub can't be reached: {first_line(error)}"
        fix = "Check the path or the network. For a dataset downloaded earlier set  HF_HUB_OFFLINE=1"
        raise DataError(problem, fix) from None
    except (DatasetsError, OSError, ValueError) as error:
        fix = "Look at the dataset's page on the hub, or download its files and give their path."
        if "split" in str(error):
            fix = "Name a split with dataset.split, for example  dataset.split=train"
        elif "onfig" in str(error):  # Config or config
            fix = "Name a configuration with dataset.name."
        raise DataError(f"{name}: can't be loaded from the hub: {first_line(error)}", fix) from None
    for number, row in enumerate(rows, 1):
        yield Row(f"{name}:{split}", number, {key: drop_nulls(value) for key, value in row.items()})
