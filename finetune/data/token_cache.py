"""Keep tokenised rows on disk, in a folder by content and everything that decides the tokens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from finetune.checksum import with_checksum
from finetune.data.column_semantics import UnusedColumns
from finetune.data.examples import SourceReader
from finetune.data.pictures.reader import FileStat, file_stat
from finetune.data.readers import file_type
from finetune.data.report import Refused
from finetune.data.row_parser import ParsedBatch, RowParser
from finetune.data.shards import SourcePart, table_of
from finetune.data.sources import Source
from finetune.data.tokens import Encoder
from finetune.data.workers import results_in_forks
from finetune.errors import DataError, DiskFull
from finetune.files import cache_dir, read_object, write_text
from finetune.serialise import from_json, to_json
from finetune.settings import DatasetRecipe
from finetune.system import replace, take_lock

#: Called with the number of tokenised rows.
Progress = Callable[[int], None]
#: Smaller files are tokenised in memory each time.
SMALL_BYTES = 2**20
#: Settings of `dataset` that choose rows or name files; all others decide how rows are read.
_SELECTING_SETTINGS = (
    "path", "eval_path", "eval_split", "split", "name", "revision", "on_bad_rows", "accept_findings", "test_split_size",
    "max_rows", "weights",
)  # fmt: skip
_ENCODE_ROWS = 256
#: Threads that verify checksums.
_CHECKSUM_THREADS = 4
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "pyarrow")
_LINE_TYPES = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt")


@dataclass(frozen=True)
class FileInfo:
    """A source file before it is read."""

    stat: FileStat = None
    sha256: str = ""
    #: Approximate number of rows; None if a line is not a row.
    lines: int | None = None

    @classmethod
    def of(cls, source: Source) -> FileInfo:
        """Stat and hash the file. Raise DataError."""
        path = source.path
        if path is None:
            return cls()
        try:
            stat = file_stat(path)
            digest, lines = hashlib.sha256(), 0
            with path.open("rb", buffering=0) as file:
                while chunk := file.read(2**22):
                    digest.update(chunk)
                    lines += chunk.count(b"\n")
        except OSError as error:
            raise DataError(
                f"{source.name}: can't be read: {error.strerror or error}", "Check the file and its disk."
            ) from None
        return cls(stat, digest.hexdigest(), lines if path.suffix.lower() in _LINE_TYPES and not source.only_split else None)


def tokenise_source(
    source: Source, info: FileInfo, dataset: DatasetRecipe, limit: int | None, encoder: Encoder, progress: Progress
) -> SourcePart:
    """Return at most `limit` tokenised rows of a source. Raise DataError or DiskFull."""
    path = source.path
    if path is None or info.stat is None or info.stat[0] < SMALL_BYTES:
        return _tokenise_in_memory(SourceReader(source, dataset, limit), encoder, progress)
    entry = CacheEntry(cache_folder() / _cache_key(info, source, dataset, limit, encoder), path.parent)
    part = entry.read(source.name)
    if part is None:
        part = _fill_entry(entry, SourceReader(source, dataset, limit), encoder, progress)
        if file_stat(path) != info.stat:
            entry.remove()
            raise DataError(f"{source.name}: was changed while it was read", "Run the command again.")
    progress(part.rows_read)
    return part


def cache_folder() -> Path:
    """Return the folder of all entries."""
    return cache_dir() / "tokens"


def _tokenise_in_memory(reader: SourceReader, encoder: Encoder, progress: Progress) -> SourcePart:
    part = SourcePart(reader.parser.file, reader.parser.format, reader.parser.columns)
    for parsed in reader.parsed():
        part.refused += parsed.refused
        if not reader.unused.stops_run:
            part.tables.append(_tokenised(parsed, encoder, lambda rows: progress(part.rows_read + rows)))
        part.rows_read = reader.rows_read
        progress(part.rows_read)
    part.unused_columns = reader.unused_columns
    return part


def _fill_entry(entry: CacheEntry, reader: SourceReader, encoder: Encoder, progress: Progress) -> SourcePart:
    with entry.writing(lambda: progress(0)):
        part = entry.read(reader.parser.file)
        if part is not None:
            return part
        shard_count, rows_done = 0, 0
        work = partial(_tokenise_batch, entry, reader.parser, encoder)
        tasks = ((index, batch, not reader.unused.stops_run) for index, batch in enumerate(reader.batches()))
        with contextlib.closing(results_in_forks(work, tasks)) as results:
            for shard_count, (rows, unused) in enumerate(results, 1):  # noqa: B007 - used after the loop
                rows_done += rows
                reader.unused.merge(unused)
                progress(rows_done)
        reader.finish()
        entry.finish(reader, shard_count)
        part = entry.read(reader.parser.file)
        if part is None:
            raise DiskFull(f"{entry.folder} can't be read back", "Check the disk, or set FINETUNE_CACHE to another folder.")
        return part


def _tokenise_batch(
    entry: CacheEntry, parser: RowParser, encoder: Encoder, index: int, batch: list[Any], write: bool
) -> tuple[int, UnusedColumns]:
    # an interrupted preparation has written some batches
    if (shard := entry.shard(index, parser.file)) is not None:
        return len(batch), shard[2]
    parsed = parser.parse(batch)
    if write and not parsed.unused.stops_run:
        entry.write(index, _tokenised(parsed, encoder), parsed)
    return len(batch), parsed.unused


def _tokenised(parsed: ParsedBatch, encoder: Encoder, progress: Progress = lambda _: None) -> pa.Table:
    results: list[Any] = []
    for start in range(0, len(parsed.examples), _ENCODE_ROWS):
        results += encoder.encode(parsed.examples[start : start + _ENCODE_ROWS])
        progress(len(results))
    return table_of(parsed.examples, results)


class CacheEntry:
    """One folder of the cache."""

    # `00000.arrow` has the rows of one batch and `00000.json` their checksum; `source.json` is written after the last batch.
    # A file is complete or absent, so an interrupted preparation continues with the missing batches.
    def __init__(self, folder: Path, data_folder: Path) -> None:
        # paths of images start in the data's folder
        self.folder, self._data_folder = folder, str(data_folder.absolute())

    def read(self, name: str) -> SourcePart | None:
        """Return all rows; None if the entry is unfinished or damaged, or an image changed."""
        values = read_object(self.folder / "source.json")
        if values is None:
            return None
        part = SourcePart(name, values["format"], values["columns"], tuple(values["unused_columns"]), values["read"])
        with ThreadPoolExecutor(_CHECKSUM_THREADS) as pool:  # computing checksums takes longer than mapping the files
            shards = list(pool.map(lambda index: self.shard(index, name), range(values["shards"])))
        for shard in shards:
            if shard is None:
                return None
            part.tables.append(shard[0])
            part.refused += shard[1]
        os.utime(self.folder)
        return part

    def shard(self, index: int, name: str) -> tuple[pa.Table, list[Refused], UnusedColumns] | None:
        """Return a batch, memory-mapped; None if it is missing, damaged, or an image changed."""
        path = self._path(index)
        values = read_object(path.with_suffix(".json"))
        try:
            if values is None or values["crc32"] != _crc32(path):
                return None
            pictures = values.get("pictures", {"folder": self._data_folder, "files": {}})
            stats = ((file_stat(Path(name)), stat and tuple(stat)) for name, stat in pictures["files"].items())
            if pictures["folder"] != self._data_folder or any(now != before for now, before in stats):
                return None
            with pa.memory_map(str(path)) as file:
                table = pa.ipc.open_file(file).read_all()
        except (OSError, pa.ArrowException):
            return None
        refused = [Refused(name, *row) for row in values["refused"]]
        return table, refused, from_json(UnusedColumns, values["unused"])

    def write(self, index: int, table: pa.Table, parsed: ParsedBatch) -> None:
        """Write one batch. Raise DiskFull."""
        path = self._path(index)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with self._disk_errors():
                with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                    writer.write_table(table)
                crc32 = _crc32(temporary)
                replace(temporary, path)
                refused_rows = [(row.row, row.field, row.reason) for row in parsed.refused]
                values = {"crc32": crc32, "refused": refused_rows, "unused": to_json(parsed.unused)}
                if parsed.picture_files:
                    values["pictures"] = {"folder": self._data_folder, "files": parsed.picture_files}
                write_text(path.with_suffix(".json"), with_checksum(json.dumps(values)))
        finally:
            temporary.unlink(missing_ok=True)

    def finish(self, reader: SourceReader, shard_count: int) -> None:
        """Mark the entry as complete. Raise DiskFull."""
        values = {
            "shards": shard_count, "read": reader.rows_read, "format": reader.parser.format, "columns": reader.parser.columns,
            "unused_columns": reader.unused_columns,
        }  # fmt: skip
        with self._disk_errors():
            write_text(self.folder / "source.json", with_checksum(json.dumps(values)))

    @contextlib.contextmanager
    def writing(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the entry's lock, waiting for other processes. Raise DiskFull."""
        with self._disk_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            while (lock := take_lock(self.folder / "lock", 0.5)) is None:
                on_wait()
        # a killed process leaves these
        for leftover in self.folder.glob(".*.arrow.*"):
            leftover.unlink(missing_ok=True)
        try:
            yield
        finally:
            lock.release()

    def remove(self) -> None:
        # processes that have the files mapped can still read them
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:05d}.arrow"

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DiskFull(
                f"{self.folder}: tokenised rows can't be written: {error.strerror or error}",
                "Free some space (`finetune cache clear` deletes older rows), "
                "or set FINETUNE_CACHE to a folder on another disk.",
            ) from None


def _crc32(path: Path) -> int:
    value = 0
    # a mapped file would count as memory of the process
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(2**22):
            value = zlib.crc32(chunk, value)
    return value


def _cache_key(info: FileInfo, source: Source, dataset: DatasetRecipe, limit: int | None, encoder: Encoder) -> str:
    settings = {name: value for name, value in dataset.model_dump(mode="json").items() if name not in _SELECTING_SETTINGS}
    # the template writes today's date into every row
    today = time.strftime("%Y-%m-%d") if "strftime_now" in str(encoder.tokenizer.chat_template) else None
    path = source.path or Path()
    kind = [file_type(path), path.suffix.lower(), source.split if source.only_split else None]
    parts = [info.sha256, kind, settings, limit, encoder.identity, today, _code_digest()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@cache
def _code_digest() -> str:
    digest = hashlib.sha256(json.dumps([(name, version(name)) for name in _LIBRARIES]).encode())
    # any change to this package may change tokens
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
