"""Read a source, tokenise it in several processes, and cache its rows by a hash of everything that decides their tokens."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pyarrow as pa

from finetune.checksum import with_checksum
from finetune.data.column_semantics import UnusedColumns
from finetune.data.pictures.source import disk_errors, file_stat
from finetune.data.readers import Row, file_type
from finetune.data.report import Refused, printable
from finetune.data.row_parser import ParsedBatch, RowParser, choose_parser
from finetune.data.shards import TokenisedSource, table_of
from finetune.data.sources import Source
from finetune.data.tokens import Encoder
from finetune.errors import DataError, OutOfMemory
from finetune.files import cache_dir, sha256_of, write_text
from finetune.gc_settings import raise_gc_thresholds
from finetune.serialise import read_json_as, to_json
from finetune.settings import DatasetRecipe
from finetune.system import replace as move
from finetune.system import usable_cpus

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
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "pyarrow")  # whose versions are in the cache key


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
    file = cache_folder() / f"{_cache_key(source, dataset, limit, encoder)}.arrow"
    if (tokenised := _read_cached(file, source.name)) is None:
        temporary = file.with_name(f".{file.name}.{os.getpid()}")  # another process may write the same rows
        with disk_errors(file.parent, "tokenised rows"):
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with pa.OSFile(str(temporary), "wb") as output, pa.ipc.new_file(output, table_of([], []).schema) as writer:
                    tokenised = _tokenise(SourceReader(source, dataset, limit), encoder, progress, writer.write_table)
                if file_stat(path) != stat:
                    raise DataError(f"{source.name}: was changed while it was read", "Run the command again.")
                tokenised.sha256 = sha256_of(temporary)
                move(temporary, file)
                write_text(file.with_suffix(".json"), with_checksum(json.dumps(to_json(tokenised))))
                tokenised.tables = [_map_table(file)]
            finally:
                temporary.unlink(missing_ok=True)
    progress(tokenised.rows_read)
    return tokenised


def _read_cached(file: Path, name: str) -> TokenisedSource | None:
    """Return the rows in a file; None if it is missing or damaged, or if an image changed."""
    tokenised = read_json_as(file.with_suffix(".json"), TokenisedSource)
    if tokenised is None or any(file_stat(Path(image)) != stat for image, stat in tokenised.pictures.items()):
        return None
    try:
        if sha256_of(file) != tokenised.sha256:
            return None
        tables = [_map_table(file)]
    except OSError:
        return None
    refused = [replace(row, file=name) for row in tokenised.refused]  # the data file may have another name now
    return replace(tokenised, file=name, refused=refused, tables=tables)


def cache_folder() -> Path:
    """Return the folder of all entries: KEY.arrow, sealed by the hash in KEY.json."""
    return cache_dir() / "tokens"


def _tokenise(
    reader: SourceReader, encoder: Encoder, progress: Progress, write: Callable[[pa.Table], object] | None = None
) -> TokenisedSource:
    tokenised = TokenisedSource(reader.parser.file, reader.parser.format, reader.parser.columns)
    write = write or tokenised.tables.append
    # after an unread column that stops the run, rows are only parsed, for the other problems
    tasks = ((rows, not reader.unused.stops_run) for rows in reader.batches())
    with contextlib.closing(results_in_forks(partial(_tokenise_batch, reader.parser, encoder), tasks)) as results:
        for row_count, parsed, table in results:
            tokenised.rows_read += row_count
            tokenised.refused += parsed.refused
            tokenised.pictures |= parsed.picture_files
            reader.unused.merge(parsed.unused)
            write(table)
            progress(tokenised.rows_read)
    tokenised.unused_columns = reader.finish()
    return tokenised


def _tokenise_batch(
    parser: RowParser, encoder: Encoder, rows: list[Any], is_used: bool
) -> tuple[int, ParsedBatch, pa.Table]:  # fmt: skip
    parsed = parser.parse(rows)
    examples = parsed.examples if is_used and not parsed.unused.stops_run else []
    results: list[Any] = []
    for start in range(0, len(examples), _ENCODE_ROWS):
        results += encoder.encode(examples[start : start + _ENCODE_ROWS])
    # the table has the examples: they needn't be sent to the parent process, too
    return len(rows), replace(parsed, examples=[]), table_of(examples, results)


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
    digest = hashlib.sha256(json.dumps([(name, version(name)) for name in _LIBRARIES]).encode())
    # any change to this package may change tokens
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


_MAX_PROCESSES = 8  # more processes don't help: one process reads and distributes the rows


def results_in_forks(work: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> Generator[Any, None, None]:
    """Yield `work(*task)` of each task, in order. Closing ends the forks."""
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
        idle, running, results = [*processes], dict[Connection, int](), dict[int, Any]()  # tasks and results by their number
        numbered = enumerate(itertools.chain(second_task, remaining))
        next_number = 0
        while True:
            for number, task in itertools.islice(numbered, len(idle)):
                running[idle[-1]] = number
                idle.pop().send(task)
            if not running:
                return
            for connection in wait([*running]):
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
                results[running.pop(connection)] = result
                idle.append(connection)
            while next_number in results:
                yield results.pop(next_number)
                next_number += 1
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
