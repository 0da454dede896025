"""Read a source, tokenise it in several processes, and cache its rows by a hash of everything that decides their tokens."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pyarrow as pa

from finetune.data.column_semantics import UnusedColumns
from finetune.data.pictures.source import disk_errors, file_stat
from finetune.data.readers import Row, file_type
from finetune.data.report import Refused, printable
from finetune.data.row_parser import ParsedBatch, RowParser, choose_parser
from finetune.data.shards import TokenisedSource, table_of
from finetune.data.sources import Source
from finetune.data.tokens import Encoder
from finetune.errors import DataError, OutOfMemory
from finetune.files import cache_dir, read_object, sha256_of, with_checksum, write_text
from finetune.settings import DatasetRecipe
from finetune.system import raise_gc_thresholds, take_lock, usable_cpus

Progress = Callable[[int], None]  # called with the number of tokenised rows
_SAMPLE_ROWS = 1000  # rows read to detect the format
#: A batch ends after this number of rows, or of characters, as does the sample.
BATCH_ROWS, _BATCH_CHARACTERS = 4096, 2**24
PICTURE_BATCH_ROWS = 256  # rows of a batch with images, which take longer: each image is decoded
SMALL_BYTES = 2**20  # smaller files are tokenised in memory each time
#: Settings of `dataset` that choose rows or name files; all others decide how rows are read.
_SELECTING_SETTINGS = (
    "path", "eval_path", "eval_split", "split", "name", "revision", "on_bad_rows", "accept_findings", "test_split_size",
    "max_rows",
)  # fmt: skip
_ENCODE_ROWS = 256  # in one call of the encoder


class SourceReader:
    """Reads one source in batches."""

    def __init__(self, source: Source, dataset: DatasetRecipe, limit: int | None) -> None:
        self._remaining_rows: Iterator[Row | Refused] = itertools.islice(source.rows(), limit)
        self._sample = _take_batch(self._remaining_rows, _SAMPLE_ROWS)
        rows = [row for row in self._sample if isinstance(row, Row)]
        if not rows:
            problem = f"{source.name}: none of the first {len(self._sample):,} row(s) can be read"
            raise DataError([problem, str(self._sample[0])], "Correct the file.")
        folder = None if source.path is None else source.path.parent
        self.parser = choose_parser(source.name, [row.values for row in rows], dataset, folder)
        #: Unread columns and fields; `finish` raises DataError if they stop the run.
        self.unused = UnusedColumns(self.parser.file, self.parser.format)

    def batches(self) -> Iterator[list[Row | Refused]]:
        rows = itertools.chain(self._sample, self._remaining_rows)
        batch_rows = PICTURE_BATCH_ROWS if self.parser.pictures.are_usual else BATCH_ROWS
        while batch := _take_batch(rows, batch_rows):
            yield batch

    def parsed(self) -> Iterator[ParsedBatch]:
        """Yield parsed batches, then `finish`."""
        for batch in self.batches():
            parsed = self.parser.parse(batch)
            self.unused.merge(parsed.unused)
            yield parsed
        self.finish()

    def finish(self) -> tuple[str, ...]:
        """Return the unread columns and fields. Raise DataError if they may change the meaning."""
        if blocking := self.unused.blocking():
            raise self.unused.error(blocking, self.parser.dataset.ignore_columns)
        return tuple(dict.fromkeys((*self.parser.unused_columns, *map(printable, self.unused.uses))))


def _take_batch(rows: Iterator[Row | Refused], max_rows: int) -> list[Row | Refused]:
    batch: list[Row | Refused] = []
    characters = 0
    for row in itertools.islice(rows, max_rows):
        batch.append(row)
        characters += _characters(row.values) if isinstance(row, Row) else 0
        if characters > _BATCH_CHARACTERS:
            break
    return batch


def _characters(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 8 + sum(map(_characters, items))  # numbers, and the frame of a list or dict, take about 8


def tokenise_source(
    source: Source, dataset: DatasetRecipe, limit: int | None, encoder: Encoder, progress: Progress
) -> TokenisedSource:
    """Return at most `limit` tokenised rows of a source. Raise DataError or DiskFull."""
    path, stat = source.path, source.info.stat
    if path is None or stat is None or stat[0] < SMALL_BYTES:
        return _tokenise(SourceReader(source, dataset, limit), encoder, progress)
    folder = cache_folder() / _cache_key(source, dataset, limit, encoder)
    tokenised = _read_cached(folder, source.name)
    if tokenised is None:
        with disk_errors(folder, "tokenised rows"):
            folder.mkdir(parents=True, exist_ok=True)
            while (lock := take_lock(folder / "lock", 0.5)) is None:
                progress(0)
        try:
            tokenised = _read_cached(folder, source.name)  # another process may have written it meanwhile
            if tokenised is None:
                tokenised = _tokenise(SourceReader(source, dataset, limit), encoder, progress, folder)
            if file_stat(path) != stat:
                # processes that have the files mapped can still read them
                shutil.rmtree(folder, ignore_errors=True)
                raise DataError(f"{source.name}: was changed while it was read", "Run the command again.")
        finally:
            lock.release()
    progress(tokenised.rows_read)
    return tokenised


def cache_folder() -> Path:
    """Return the folder of all entries."""
    return cache_dir() / "tokens"


def _tokenise(reader: SourceReader, encoder: Encoder, progress: Progress, folder: Path | None = None) -> TokenisedSource:
    tokenised = TokenisedSource(reader.parser.file, reader.parser.format, reader.parser.columns)
    batches: dict[int, tuple[ParsedBatch, pa.Table | str]] = {}
    work = partial(_tokenise_batch, folder, reader.parser, encoder)
    # after an unread column that stops the run, rows are only parsed, for the other problems
    tasks = ((index, rows, not reader.unused.stops_run) for index, rows in enumerate(reader.batches()))
    with contextlib.closing(results_in_forks(work, tasks)) as results:
        for index, row_count, parsed, table_or_hash in results:
            batches[index] = parsed, table_or_hash
            tokenised.rows_read += row_count
            reader.unused.merge(parsed.unused)
            progress(tokenised.rows_read)
    tokenised.unused_columns = reader.finish()
    ordered = [batch for _, batch in sorted(batches.items())]
    tokenised.refused = [row for parsed, _ in ordered for row in parsed.refused]
    if folder is None:
        tokenised.tables = [table for _, table in ordered]
    else:
        metadata = {
            "sha256": [sha256 for _, sha256 in ordered], "read": tokenised.rows_read, "format": tokenised.format,
            "columns": tokenised.columns, "unused_columns": tokenised.unused_columns,
            "refused": [(row.row, row.field, row.reason) for row in tokenised.refused],
            "pictures": {name: stat for parsed, _ in ordered for name, stat in parsed.picture_files.items()},
        }  # fmt: skip
        with disk_errors(folder, "tokenised rows"):
            tokenised.tables = [_map_table(_shard_path(folder, index)) for index in range(len(ordered))]
            # the last file: a folder without it is unfinished
            write_text(folder / "source.json", with_checksum(json.dumps(metadata)))
    return tokenised


def _tokenise_batch(
    folder: Path | None, parser: RowParser, encoder: Encoder, index: int, rows: list[Any], is_used: bool
) -> tuple[int, int, ParsedBatch, pa.Table | str]:
    """Return index, number of rows, the parsed batch without examples, and its table, or its file's hash in a folder."""
    parsed = parser.parse(rows)
    examples = parsed.examples if is_used and not parsed.unused.stops_run else []
    results: list[Any] = []
    for start in range(0, len(examples), _ENCODE_ROWS):
        results += encoder.encode(examples[start : start + _ENCODE_ROWS])
    # the table has the examples: they needn't be sent to the parent process, too
    table, parsed = table_of(examples, results), replace(parsed, examples=[])
    if folder is None:
        return index, len(rows), parsed, table
    path = _shard_path(folder, index)
    with disk_errors(folder, "tokenised rows"):
        path.unlink(missing_ok=True)  # not overwritten: a process may have a damaged one mapped
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        return index, len(rows), parsed, sha256_of(path)


def _read_cached(folder: Path, name: str) -> TokenisedSource | None:
    """Return the rows in a folder; None if unfinished or damaged, or if an image changed."""
    metadata = read_object(folder / "source.json")
    if metadata is None:
        return None
    # JSON has lists for tuples
    if any(file_stat(Path(image)) != (stat and tuple(stat)) for image, stat in metadata["pictures"].items()):
        return None
    paths = [_shard_path(folder, index) for index in range(len(metadata["sha256"]))]
    try:
        with ThreadPoolExecutor(4) as pool:  # hashing takes longer than mapping the files
            if list(pool.map(sha256_of, paths)) != metadata["sha256"]:
                return None
        tables = [*map(_map_table, paths)]
    except OSError:
        return None
    refused = [Refused(name, *row) for row in metadata["refused"]]
    unused_columns = tuple(metadata["unused_columns"])
    return TokenisedSource(name, metadata["format"], metadata["columns"], unused_columns, metadata["read"], refused, tables)


def _shard_path(folder: Path, index: int) -> Path:
    return folder / f"{index:05d}.arrow"


def _map_table(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def _cache_key(source: Source, dataset: DatasetRecipe, limit: int | None, encoder: Encoder) -> str:
    settings = {name: value for name, value in dataset.model_dump(mode="json").items() if name not in _SELECTING_SETTINGS}
    # the template writes today's date into every row
    today = time.strftime("%Y-%m-%d") if "strftime_now" in str(encoder.tokenizer.chat_template) else None
    path = source.path or Path()
    # paths of images start in the file's folder
    kind = [file_type(path), path.suffix.lower(), source.split, str(path.parent.absolute())]
    inputs = [source.info.sha256, kind, settings, limit, encoder.identity, today, _code_digest()]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]


@cache
def _code_digest() -> str:
    # another version of these libraries, and any change to this package, may change tokens
    libraries = [(name, version(name)) for name in ("transformers", "tokenizers", "jinja2", "pyarrow")]
    digest = hashlib.sha256(json.dumps(libraries).encode())
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


_MAX_PROCESSES = 8  # more processes don't help: one process reads and distributes the rows


def results_in_forks(work: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> Generator[Any, None, None]:
    """Yield `work(*task)` of each task, in any order. Closing ends the forks."""
    # macOS and Windows can't fork safely
    count = min(usable_cpus(), _MAX_PROCESSES) if sys.platform == "linux" else 1
    # the first task runs here, so that an error of all tasks comes before the forks; without forks, all tasks do
    remaining = iter(tasks)
    yield from itertools.starmap(work, itertools.islice(remaining, 1 if count > 1 else None))
    second_task = [*itertools.islice(remaining, 1)]
    processes: dict[Connection, Any] = {}  # by the parent's end of their pipe
    try:
        for _ in range(count if second_task else 0):
            parent_end, child_end = get_context("fork").Pipe()
            arguments = (child_end, [*processes, parent_end], work)
            process = get_context("fork").Process(target=_serve, args=arguments, daemon=True)
            # the fork lacks other threads, such as the status line's, and doesn't need them
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                process.start()
            child_end.close()
            processes[parent_end] = process
        idle, remaining = [*processes], itertools.chain(second_task, remaining)
        while True:
            for task in itertools.islice(remaining, len(idle)):
                idle.pop().send(task)
            busy = [connection for connection in processes if connection not in idle]
            if not busy:
                return
            for connection in wait(busy):
                assert isinstance(connection, Connection)
                try:
                    result = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise OutOfMemory(
                        "a process that tokenises rows was killed; the machine may be out of memory",
                        "Close other programs, and run the command again.",
                    ) from None
                if isinstance(result, Exception):
                    raise result
                idle.append(connection)
                yield result
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _serve(tasks: Connection, inherited: list[Connection], work: Callable[..., Any]) -> None:
    # a fork exits when its pipe closes, so it must not hold the parent's ends
    for connection in inherited:
        connection.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the forks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # collecting would copy the pages that forks share
    raise_gc_thresholds()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with contextlib.suppress(EOFError, OSError):  # until the parent is gone
        while True:
            task = tasks.recv()
            try:
                result = work(*task)
            except Exception as error:  # noqa: BLE001 - raised again in the parent
                result = error
            tasks.send(result)
