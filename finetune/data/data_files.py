"""Find the data files of a folder or pattern, and each file's split by name."""

from __future__ import annotations

import glob
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from finetune.data.readers import READERS, file_type
from finetune.data.report import printable
from finetune.errors import DataError
from finetune.files import expanded

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


@dataclass(frozen=True)
class DataFiles:
    """The sorted data files of a folder or pattern."""

    path: str
    #: The split of each file; None where the name doesn't say.
    splits: dict[Path, str | None]

    @classmethod
    def of(cls, path_text: str) -> DataFiles | None:
        """Find the data files of a folder or pattern; None for anything else."""
        path = expanded(path_text)
        try:
            if path.is_dir():
                root, files = path, _files_in(path)
            elif set("*?[") & set(path_text) and not path.exists():
                fixed = next(index for index, part in enumerate(path.parts) if set("*?[") & set(part))
                root = Path(*path.parts[:fixed])
                if "**" in path.parts and root in (Path(path.anchor), Path.home()):
                    raise DataError(
                        f"{printable(path_text, 200)}: would search all of {root}", "Name the folder with the data."
                    )
                matches = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 - the pattern may be absolute
                files = [file for file in matches if file.is_file() and _is_named_as_data(file)]
            else:
                return None
        except (OSError, ValueError):
            return None
        splits = {file: _split_of(file.relative_to(root)) for file in sorted(files)}
        if set("*?[") & set(path_text) and set(splits.values()) == {_split_of(path.relative_to(root))}:
            splits = dict.fromkeys(splits)  # the pattern itself names the split, and asks for these files
        return cls(path_text, splits)

    @property
    def is_split(self) -> bool:
        """Return whether some names say that rows are not for training."""
        return bool(set(self.splits.values()) - {TRAIN, None})

    def _named(self, *splits: str | None) -> list[Path]:
        return [file for file, split in self.splits.items() if split in splits]

    def of_split(self, name: str) -> list[Path]:
        """Return the files of a split. Raise DataError without files."""
        files = self._named(_SPLIT_WORDS.get(name.lower(), name))
        if not files:
            names = ", ".join(dict.fromkeys(split or "other files" for split in self.splits.values()))
            raise DataError(
                f"{printable(self.path, 200)}: no file is named for {printable(name)}; it has {names}", "Name one of them."
            )
        return files

    def training(self) -> list[Path]:
        """Return the files to train on. Raise DataError for unclear names."""
        files, unclear = self._named(TRAIN, None), self._named(_MIXED, None)
        if self.is_split and (unclear or not files):
            label = printable(self.path, 200)
            if not files:
                problem = f"{label}: no file is named for training; it has {self.names(list(self.splits))}"
            else:
                problem = f"{label}: some files are named for a split, but not these: {self.names(unclear)}"
            raise DataError(problem, self._explicit(files or unclear or list(self.splits)))
        return files

    def held_out(self) -> list[Path]:
        # test files are left alone
        return self._named(VALIDATION) if self.is_split else []

    def evaluation(self) -> list[Path]:
        """Return the files to evaluate on, if the whole path is held out."""
        return self._named(VALIDATION) or self._named(TEST) or list(self.splits)

    def names(self, files: list[Path]) -> str:
        """Name some files, with folders if there are several."""
        root = os.path.commonpath([file.parent for file in self.splits])
        more = f", ... ({len(files)} in all)" if len(files) > _LISTED_FILES else ""
        return f"{', '.join(printable(file.relative_to(root).as_posix()) for file in files[:_LISTED_FILES])}{more}"

    def _explicit(self, training: list[Path]) -> str:
        held_out = [file for file in self._named(VALIDATION) if file not in training]
        if len(training) + len(held_out) > _LISTED_FILES:
            return "Put the files into folders named train, validation and test, or name them:  'dataset.path=[FILE, FILE]'"
        values = {
            name: str(files[0]) if len(files) == 1 else f"[{', '.join(map(str, files))}]"
            for name, files in (("path", training), ("eval_path", held_out))
            if files
        }
        arguments = (shlex.quote(f"dataset.{name}={value}") for name, value in values.items())
        return f"Name the files to train on and to hold out:  {'  '.join(arguments)}"


def describe_split(files: DataFiles, trained: set[Path], held_out: set[Path]) -> str:
    """Describe which files are trained on, held out and not read."""
    uses = [(trained, "to train on"), (held_out, "held out"), (set(files.splits) - trained - held_out, "not read")]
    named = [(files.names([file for file in files.splits if file in paths]), use) for paths, use in uses]
    parts = [f"{names} {use}" for names, use in named if names]
    return f"files of {printable(files.path, 200)} are used by name: {'; '.join(parts)}"


def _files_in(folder: Path) -> list[Path]:
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    files = [entry for entry in entries if _is_data(entry)]
    folders = [entry for entry in entries if entry.is_dir()]
    for subfolder in folders:
        # subfolders that are named for a split
        if _split_of(Path(subfolder.name, "rows")) is not None:
            files += [file for file in subfolder.iterdir() if _is_data(file)]
    # without any file, an only subfolder
    return files if files or len(folders) != 1 else _files_in(folders[0])


def _is_data(entry: Path) -> bool:
    return entry.is_file() and file_type(entry) in FOLDER_TYPES and _is_named_as_data(entry)


def _is_named_as_data(entry: Path) -> bool:
    return not entry.name.startswith(".") and entry.name not in _DESCRIPTIONS


def _split_of(path: Path) -> str | None:
    text = re.sub(r"([a-z])([A-Z])", r"\1 \2", "/".join((*path.parts[:-1], path.name.split(".", 1)[0] or path.name)))
    stem_words = re.findall(r"[a-z]+", f"{text} {'.'.join(path.suffixes)}".lower().replace("held_out", "heldout"))
    splits = {_SPLIT_WORDS[word] for word in stem_words if word in _SPLIT_WORDS}
    return splits.pop() if len(splits) == 1 else _MIXED if splits else None
