"""Tokenised rows on disk: a folder for each source, by its content and everything that decides its tokens.

`00000.arrow` are the rows of one batch and `00000.json` their checksum; `source.json` is written when all are there. A file is
complete or absent, so an interrupted preparation goes on with the batches that are missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from finetune.data.examples import HowToRead, Reading
from finetune.data.meaning import stop
from finetune.data.readers import kind_of_file
from finetune.data.report import Refused
from finetune.data.shards import Part, table_of
from finetune.data.workers import Workers
from finetune.errors import DataError, DiskFull
from finetune.files import cache_dir, write_text
from finetune.system import replace, take_lock

if TYPE_CHECKING:
    from finetune.data.sources import Source
    from finetune.data.tokens import Encoder
    from finetune.recipe import DatasetRecipe

#: Called with the number of rows done.
Progress = Callable[[int], None]
#: Smaller files are tokenised in memory each time.
SMALL_BYTES = 2**20
#: Settings of `dataset` that choose among rows or name files; all others decide how rows are read.
_CHOOSE = (
    "path", "eval_path", "eval_split", "split", "name", "revision", "on_bad_rows", "accept_findings", "test_split_size",
    "max_rows", "weights",
)  # fmt: skip
_AT_ONCE = 256
#: Threads that check files.
_CHECKERS = 4
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "pyarrow")
_LINES = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt")


@dataclass(frozen=True)
class Facts:
    """A source before it is read. `sha256` of large files; `lines`: about its rows, None where lines are not rows."""

    state: tuple[int, ...] | None = None
    sha256: str = ""
    lines: int | None = None

    @classmethod
    def of(cls, source: Source) -> Facts:
        """Raises DataError when the file can't be read."""
        path = source.path
        if path is None:
            return cls()
        try:
            state = _state(path)
            digest, lines = hashlib.sha256(), 0
            with path.open("rb", buffering=0) as file:
                while part := file.read(2**22):
                    digest.update(part)
                    lines += part.count(b"\n")
        except OSError as error:
            raise DataError(
                f"{source.name}: can't be read: {error.strerror or error}", "Check the file and its disk."
            ) from None
        return cls(state, digest.hexdigest(), lines if path.suffix.lower() in _LINES and not source.only else None)


def tokenised(
    source: Source, facts: Facts, dataset: DatasetRecipe, limit: int | None, encoder: Encoder, progress: Progress
) -> Part:
    """The rows of a source as tokens: from the cache, or read and tokenised now. At most `limit` rows are read.

    `progress` counts them. Raises DataError when it can't be read, DiskFull when the cache can't be written.
    """
    part = _tokenised(source, facts, dataset, limit, encoder, progress)
    part.weight = source.weight
    return part


def _tokenised(
    source: Source, facts: Facts, dataset: DatasetRecipe, limit: int | None, encoder: Encoder, progress: Progress
) -> Part:
    path = source.path
    if path is None or facts.state is None or facts.state[0] < SMALL_BYTES:
        return _in_memory(Reading(source, dataset, limit), encoder, progress)
    entry = Entry(folder() / _key(facts, source, dataset, limit, encoder))
    part = entry.read(source.name)
    if part is None:
        part = _prepared(entry, Reading(source, dataset, limit), encoder, progress)
        if _state(path) != facts.state:
            entry.remove()
            raise DataError(f"{source.name}: was changed while it was read", "Run the command again.")
    progress(part.read)
    return part


def folder() -> Path:
    """Where the entries are."""
    return cache_dir() / "tokens"


def _in_memory(reading: Reading, encoder: Encoder, progress: Progress) -> Part:
    how = reading.how
    part = Part(how.file, how.format, how.columns, how.unused_columns)
    for batch in reading.batches():
        parsed = how.parse(batch)
        reading.add(parsed.unused)
        part.refused += parsed.refused
        if not reading.is_refused:
            before = reading.read - len(batch)
            part.tables.append(table_of(parsed.examples, _encoded(encoder, parsed.examples, before, progress)))
        progress(reading.read)
    reading.finish()
    part.read = reading.read
    return part


def _prepared(entry: Entry, reading: Reading, encoder: Encoder, progress: Progress) -> Part:
    """Tokenise what the entry lacks."""
    with entry.writing(lambda: progress(0)):
        part = entry.read(reading.how.file)
        if part is not None:
            return part
        workers, shards, done = None, 0, 0
        work = _Work(entry, reading.how, encoder)
        try:
            for number, batch in enumerate(reading.batches()):
                shards, results = number + 1, []
                if entry.shard(number, reading.how.file) is not None:
                    done += len(batch)
                elif number == 0:  # here, so that a template's error comes before the forks
                    results = [work(number, batch, True, progress)]
                else:
                    workers = workers or Workers(work)
                    results = list(workers.hand(number, batch, not reading.is_refused))
                done += sum(count for count, _ in results)
                for _, unused in results:
                    reading.add(unused)
                progress(done)
            for count, unused in workers.rest() if workers else ():
                done += count
                reading.add(unused)
                progress(done)
        finally:
            if workers:
                workers.close()
        reading.finish()
        entry.finish(reading, shards)
        part = entry.read(reading.how.file)
        if part is None:
            raise DiskFull(f"{entry.folder} can't be read back", "Check the disk, or set FINETUNE_CACHE to another folder.")
        return part


@dataclass(frozen=True)
class _Work:
    """Tokenises batches and writes them, in a fork."""

    entry: Entry
    how: HowToRead
    encoder: Encoder

    def __call__(
        self, number: int, batch: list[Any], wanted: bool, progress: Progress = lambda _: None
    ) -> tuple[int, dict[str, list[int]]]:
        """Rows done, and those that stop the run: for them nothing is written."""
        parsed = self.how.parse(batch)
        if wanted and not stop(parsed.unused):
            table = table_of(parsed.examples, _encoded(self.encoder, parsed.examples, 0, progress))
            self.entry.write(number, table, parsed.refused)
        return len(batch), parsed.unused


def _encoded(encoder: Encoder, examples: list[Any], before: int, progress: Progress) -> list[Any]:
    results: list[Any] = []
    for start in range(0, len(examples), _AT_ONCE):
        results += encoder.encode(examples[start : start + _AT_ONCE])
        progress(before + len(results))
    return results


class Entry:
    """One folder of the cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> Part | None:
        """All of it as it was written, for a source of this name; None when it isn't finished, or when a file is damaged."""
        values = _read_sealed(self.folder / "source.json")
        if values is None:
            return None
        part = Part(name, values["format"], values["columns"], tuple(values["unused_columns"]), values["read"])
        with ThreadPoolExecutor(_CHECKERS) as pool:  # their checksums take longer than to map them
            shards = list(pool.map(lambda number: self.shard(number, name), range(values["shards"])))
        for shard in shards:
            if shard is None:
                return None
            part.tables.append(shard[0])
            part.refused += shard[1]
        os.utime(self.folder)
        return part

    def shard(self, number: int, name: str) -> tuple[pa.Table, list[Refused]] | None:
        """One batch, mapped into memory; None when it is missing or damaged."""
        path, values = self._path(number), _read_sealed(self._path(number).with_suffix(".json"))
        try:
            if values is None or values["crc32"] != _crc32(path):
                return None
            with pa.memory_map(str(path)) as file:
                table = pa.ipc.open_file(file).read_all()
        except (OSError, pa.ArrowException):
            return None
        return table, [Refused(name, *row) for row in values["refused"]]

    def write(self, number: int, table: pa.Table, refused: list[Refused]) -> None:
        """Write one batch. Raises DiskFull."""
        path = self._path(number)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
            crc32 = _crc32(temporary)
            replace(temporary, path)
            rows = [(row.row, row.field, row.reason) for row in refused]
            _write_sealed(path.with_suffix(".json"), {"crc32": crc32, "refused": rows})
        except OSError as error:
            raise _full(self.folder, error) from None
        finally:
            temporary.unlink(missing_ok=True)

    def finish(self, reading: Reading, shards: int) -> None:
        """Say that all batches are there, and how they were read. Raises DiskFull."""
        how = reading.how
        values = {"shards": shards, "read": reading.read, **asdict(how)}
        try:
            _write_sealed(self.folder / "source.json", values)
        except OSError as error:
            raise _full(self.folder, error) from None

    def writing(self, waiting: Callable[[], None]) -> Any:
        """Held while batches are written; waits for another process that writes the same. Raises DiskFull."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while (lock := take_lock(self.folder / "lock", 0.5)) is None:
                waiting()
        except OSError as error:
            raise _full(self.folder, error) from None
        for left in self.folder.glob(".*.arrow.*"):
            left.unlink(missing_ok=True)
        return _Held(lock)

    def remove(self) -> None:
        """Delete it; what another process has mapped stays readable there."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05d}.arrow"


class _Held:
    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _full(folder: Path, error: OSError) -> DiskFull:
    return DiskFull(
        f"{folder}: tokenised rows can't be written: {error.strerror or error}",
        "Free some space (`finetune cache clear` deletes older rows), or set FINETUNE_CACHE to a folder on another disk.",
    )


def _write_sealed(path: Path, values: Any) -> None:
    text = json.dumps(values)
    write_text(path, json.dumps({"crc32": zlib.crc32(text.encode()), "values": text}))


def _read_sealed(path: Path) -> Any:
    """The values of a file that `_write_sealed` wrote; None when it is missing or damaged."""
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        return json.loads(written["values"]) if zlib.crc32(written["values"].encode()) == written["crc32"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb", buffering=0) as file:
        while part := file.read(2**22):
            value = zlib.crc32(part, value)
    return value


def _state(path: Path) -> tuple[int, ...]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns, about.st_ino


def _key(facts: Facts, source: Source, dataset: DatasetRecipe, limit: int | None, encoder: Encoder) -> str:
    """Digest of all that decides the tokens of a file: its content, how it is read, tokenizer, template, and this code."""
    settings = {name: value for name, value in dataset.model_dump(mode="json").items() if name not in _CHOOSE}
    today = time.strftime("%Y-%m-%d") if "strftime_now" in str(encoder.tokenizer.chat_template) else None
    path = source.path or Path()
    kind = [kind_of_file(path), path.suffix.lower(), source.split if source.only else None]
    parts = [facts.sha256, kind, settings, limit, encoder.identity, today, _code()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """Digest of the code and libraries that make the tokens."""
    digest = hashlib.sha256(json.dumps([(name, version(name)) for name in _LIBRARIES]).encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
