"""Read local files as numbered rows; an unreadable row is reported, and reading continues."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import shlex
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, AnyStr

from finetune.data.checks import SPLITS, Values, type_phrase
from finetune.data.report import Refused, printable
from finetune.errors import DataError, RecipeError
from finetune.files import IS_LFS_POINTER, LFS_FIX, MAX_JSON_DEPTH, is_lfs_pointer, is_too_deep

#: Limits in bytes of a line, and of a .json file, which is read whole. They bound the memory of reading.
LINE_LIMIT, JSON_LIMIT = 32 * 2**20, 256 * 2**20
_BATCH_ROWS = 16  # of a Parquet file: rows with images have megabytes each
COMPRESSED = (".gz", ".zst")  # extensions that may follow the file type's, as in rows.jsonl.gz
#: Keys of a JSON object that may hold the list of rows.
_ROW_LIST_KEYS = ("data", "rows", "examples", "train", "instances", "items")
TABLES = (".parquet", ".arrow")  # file types that are not text
#: First bytes of a file -> its encoding.
_BYTE_ORDER_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
#: First bytes of a file -> its type.
_MAGIC_BYTES = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip or Excel", b"PAR1": "Parquet", b"ARROW1": "Arrow", b"BZh": "bzip2"}


@dataclass(frozen=True)
class Row:
    """The fields of one row."""

    file: str
    number: int  # counts from 1; in .jsonl and .csv files it is the line
    values: Values


def read_file(path: Path, name: str, split: str | None) -> Iterator[Row | Refused]:
    """Yield the rows of a file, compressed or not. Raise DataError for an empty, incomplete or wrong file."""
    count = 0
    try:
        if is_lfs_pointer(path):
            raise DataError(f"{name}: {IS_LFS_POINTER}", f"Fetch the file from its folder:  {LFS_FIX}")
        if file_type(path) not in TABLES:
            _check_text(path, name)
        rows = READERS[file_type(path)](path, name)
        if split is not None:
            rows = _rows_of_split(rows, split, name)
        for count, row in enumerate(rows, 1):  # noqa: B007 - `count` is read after the loop
            yield row
    except (OSError, EOFError, zlib.error) as error:
        problem = f"{name}: can't be read: {getattr(error, 'strerror', None) or error}"
        raise DataError(problem, "Check the file and the disk it is on.") from None
    if not count:
        raise DataError(f"{name}: has no rows", 'Write one row per line, for example {"prompt": "2+2=", "completion": "4"}')


def _rows_of_split(rows: Iterable[Row | Refused], split: str, name: str) -> Iterator[Row | Refused]:
    for row in rows:
        if isinstance(row, Refused):
            yield row
        elif "split" not in row.values:
            problem = "dataset.split and dataset.eval_split need a hub dataset, a folder of splits or a column 'split'"
            fix = "Leave the split out. To hold rows out, set dataset.eval_path or dataset.test_split_size."
            raise RecipeError(f"{problem}; {name} has no splits", fix)
        elif row.values["split"] == split:
            yield Row(name, row.number, {key: value for key, value in row.values.items() if key != "split"})


def file_type(path: Path) -> str:
    """Return the lower-case extension without .gz or .zst."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSED else path.suffix.lower()


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def _check_text(path: Path, name: str) -> None:
    with _open(path) as file:
        head = file.read(4096)
    if not head.strip(b"\0"):
        problem = "has only zero bytes" if head else "the file is empty (0 bytes)"
        raise DataError(f"{name}: {problem}", "Check that it was written or downloaded completely.")
    codec = next((codec for mark, codec in _BYTE_ORDER_MARKS.items() if head.startswith(mark)), "")
    if not codec and head.count(b"\0") * 4 > len(head):  # UTF-16 without a mark: every second byte of Latin text is zero
        codec = "UTF-16LE" if head[1::2].count(b"\0") > head[::2].count(b"\0") else "UTF-16BE"
    if codec:
        command = f"iconv -f {codec} -t UTF-8 {shlex.quote(name)} > fixed{path.suffix}"
        raise DataError(f"{name}: is {codec} text, not UTF-8", f"Convert it:  {command}")
    for magic, type_name in _MAGIC_BYTES.items():
        if head.startswith(magic):
            raise DataError(f"{name}: is a {type_name} file, not text", "Unpack it, or rename it with its right extension.")


def _read_json(path: Path, name: str) -> Iterator[Row | Refused]:
    # JSON Lines, an array of rows, one row, or {"data": [rows]}: the content decides, not the extension
    with _open(path) as file:
        is_array = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    if not is_array and file_type(path) != ".json":
        yield from _read_json_lines(path, name)
        return
    with _open(path) as file:
        data = file.read(JSON_LIMIT + 1)
    if len(data) > JSON_LIMIT:
        problem = f"{name}: has more than {JSON_LIMIT // 2**20} MiB of JSON, the limit of one JSON value"
        fix = f"Write one row per line:  jq -c '.[]' {shlex.quote(name)} > {path.stem}.jsonl  (rows on lines: only rename it)"
        raise DataError(problem, fix)
    text = data.decode("utf-8-sig", "surrogateescape")
    try:
        content = _parse_json(text) if text.strip() else []
    except (ValueError, RecursionError) as error:
        position = ""
        if isinstance(error, json.JSONDecodeError):
            if error.msg == "Extra data":  # several values: a row on each line
                yield from _read_json_lines(path, name)
                return
            position = f"line {error.lineno}, column {error.colno}: "
        problem = f"{name}: {position}{_json_problem(error)}"
        raise DataError(problem, "Correct it: write a list of flat objects, or one row per line in a .jsonl file.") from None
    for number, item in enumerate(_list_of_rows(content, name), 1):
        yield _row_or_refused(item, name, number)


def _read_json_lines(path: Path, name: str) -> Iterator[Row | Refused]:
    for number, text in _numbered_lines(path, name):
        try:
            row = _row_or_refused(_parse_json(text), name, number)
        except (ValueError, RecursionError) as error:
            position = f" (at character {error.pos + 1})" if isinstance(error, json.JSONDecodeError) else ""
            row = Refused(name, number, None, f"{_json_problem(error)}{position}")
        yield row


def _limited_lines(file: IO[AnyStr], name: str, fix: str) -> Iterator[AnyStr]:
    number = 0
    while line := file.readline(LINE_LIMIT + 1):
        number += 1
        if len(line) > LINE_LIMIT:
            raise DataError(f"{name}: line {number} is longer than {LINE_LIMIT // 2**20} MiB", fix)
        yield line


def _numbered_lines(path: Path, name: str) -> Iterator[tuple[int, str]]:
    fix = "A .jsonl file has one row per line. If this is one JSON array, rename it to .json."
    with _open(path) as file:
        for number, line in enumerate(_limited_lines(file, name, fix), 1):
            if content := (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip():
                # surrogateescape: `valid_text` names the row and the byte that isn't UTF-8
                yield number, content.decode("utf-8", "surrogateescape")


def _json_problem(error: Exception) -> str:
    if isinstance(error, _DuplicateKeyError):
        return f"has the key {error} more than once"
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON: {error.msg}"
    # Python refuses to parse integers of more than 4,300 digits
    return "is nested too deeply" if isinstance(error, RecursionError) else "has a number with too many digits"


class _DuplicateKeyError(ValueError):
    """A JSON object has a key twice."""


def _without_duplicate_keys(pairs: list[tuple[str, Any]]) -> Values:
    fields = dict(pairs)
    if len(fields) < len(pairs):  # Python would silently keep the last value
        keys = [key for key, _ in pairs]
        raise _DuplicateKeyError(printable(next(key for key in keys if keys.count(key) > 1)))
    return fields


_decode = json.JSONDecoder(object_pairs_hook=_without_duplicate_keys).decode


def _parse_json(text: str) -> Any:
    value = _decode(text)
    # later functions recurse into each level of a row
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and is_too_deep(value):
        raise RecursionError
    return value


def _row_or_refused(value: Any, name: str, number: int) -> Row | Refused:
    if isinstance(value, dict):
        return Row(name, number, value)
    type_name = "null" if value is None else type_phrase(value)
    return Refused(name, number, None, f"is {type_name}, not an object with named fields")


def _list_of_rows(content: Any, name: str) -> list[Any]:
    if isinstance(content, list):
        return content
    if not isinstance(content, dict):
        problem = f"{name}: is a single value, not a list of rows"
        raise DataError(problem, 'Write a list: [{"prompt": ..., "completion": ...}, ...]')
    splits = [key for key in SPLITS if isinstance(content.get(key), list)]
    if len(splits) > 1:
        problem = f"{name}: has the splits {', '.join(splits)} in one file"
        raise DataError(problem, f"Make a file of each:  jq -c '.{splits[0]}[]' {shlex.quote(name)} > {splits[0]}.jsonl")
    lists = [content[key] for key in _ROW_LIST_KEYS if isinstance(content.get(key), list)]
    return lists[0] if len(lists) == 1 else [content]


def _read_csv(path: Path, name: str) -> Iterator[Row | Refused]:
    csv.field_size_limit(LINE_LIMIT)  # the default of 128 KiB is less than one long conversation
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = _limited_lines(file, name, "Check the line ends and quotes.")
        header_line = next(lines, "")
        # the first of these separators that the header has
        delimiter = "\t" if file_type(path) == ".tsv" else next((mark for mark in ",;\t|" if mark in header_line), ",")
        reader = csv.reader(itertools.chain([header_line], lines), delimiter=delimiter, strict=True)
        column_names: list[str] = []
        while True:
            line_number = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end" in str(error) or "field larger" in str(error):
                    problem = f"{name}: line {line_number}: a quote is opened and not closed"
                    raise DataError(problem, 'Close it; a quote inside a cell is written "".') from None
                yield Refused(name, line_number, None, f"is not CSV: {error}")
                continue
            if not cells:
                continue
            if not column_names:
                column_names = [cell.strip() for cell in cells]
                if duplicates := sorted(cell for cell, count in Counter(column_names).items() if cell and count > 1):
                    problem = f"{name}: line 1: the header has {', '.join(map(printable, duplicates))} more than once"
                    raise DataError(problem, "Give each column its own name.")
            elif len(cells) != len(column_names):
                amount = "few" if len(cells) < len(column_names) else "many"
                counts = f"{len(cells)}, and the header has {len(column_names)}"
                yield Refused(name, line_number, None, f"has too {amount} cells: {counts}")
            else:
                values = (float("nan") if cell == "#N/A" else cell for cell in cells)  # Excel's mark of a missing value
                yield Row(name, line_number, dict(zip(column_names, values, strict=True)))


def _read_text(path: Path, name: str) -> Iterator[Row | Refused]:
    for number, text in _numbered_lines(path, name):
        yield Row(name, number, {"text": text})


def _table_batches(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    if file_type(path) == ".parquet":
        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=_BATCH_ROWS)
        return
    with pa.memory_map(str(path)) as file:
        if file.read(6) == b"ARROW1":
            table = pa.ipc.open_file(file)
            batches: Iterable[Any] = map(table.get_batch, range(table.num_record_batches))
        else:
            file.seek(0)
            batches = pa.ipc.open_stream(file)
        for batch in batches:
            batch.validate(full=True)  # damaged offsets would read out of bounds
            yield batch


def _read_table(path: Path, name: str) -> Iterator[Row | Refused]:
    import pyarrow as pa

    if not path.stat().st_size:
        raise DataError(f"{name}: the file is empty (0 bytes)", "Check that it was written or downloaded completely.")
    number = 0
    try:
        for batch in _table_batches(path):
            for index in range(batch.num_rows):
                number += 1
                try:
                    [values] = batch.slice(index, 1).to_pylist()
                except (ValueError, OverflowError) as error:
                    yield Refused(name, number, None, f"has a value that can't be read: {error}")
                else:
                    yield Row(name, number, {key: drop_nulls(value) for key, value in values.items()})
    except (pa.ArrowException, OSError) as error:
        reason = printable(str(error).split("\n")[0][:200], 200)
        kind = "Parquet" if file_type(path) == ".parquet" else "Arrow"
        problem = f"{name}: can't be read as {kind}: {reason}"
        raise DataError(problem, "Check that it was downloaded completely.") from None


def drop_nulls(value: Any) -> Any:
    """Drop the null fields that columnar formats add to objects."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


READERS = {
    ".jsonl": _read_json, ".ndjson": _read_json, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv,
    ".txt": _read_text, ".parquet": _read_table, ".arrow": _read_table,
}  # fmt: skip
