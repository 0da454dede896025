"""Local files -> numbered rows. An unreadable row is reported, and reading goes on with the next."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
import re
import shlex
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from finetune.data.checks import SPLITS
from finetune.data.report import Refused, shown
from finetune.errors import DataError, RecipeError

#: Limits in bytes of a line, and of a .json file, which is read whole. They bound the memory that reading takes.
LINE_LIMIT, JSON_LIMIT = 32 * 2**20, 256 * 2**20
#: Most values (of lists: elements) of a Parquet row, and of the rows that are read at once.
_MOST_VALUES = 1_000_000
#: Endings after that of the kind of file.
COMPRESSED = (".gz", ".zst")
_ROW_LISTS = ("data", "rows", "examples", "train", "instances", "items")
#: Kinds whose bytes are not text.
TABLES = (".parquet", ".arrow")
_BINARY = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip or Excel", b"PAR1": "Parquet", b"ARROW1": "Arrow", b"BZh": "bzip2"}


@dataclass(frozen=True)
class Row:
    """The fields of one row. `number` counts from 1; for .jsonl and .csv it is the line in the file."""

    file: str
    number: int
    values: dict[str, Any]


def read_file(path: Path, name: str, split: str | None = None, *, has_splits: bool = False) -> Iterator[Row | Refused]:
    """The rows of a file of a kind in READERS, also compressed with gzip or zstd; `name` is its name in problems.

    `split`: of a file with splits (keys of a .json file, or a column `split`) only this one; `has_splits`: it must have them.
    Raises DataError when it is empty, incomplete, not UTF-8 or not of its type.
    """
    count = 0
    try:
        if kind_of_file(path) not in TABLES:
            _check_text(path, name)
        read = READERS[kind_of_file(path)]
        rows = read(path, name) if split is None else _of_split(split, path, name, has_splits)
        for count, row in enumerate(rows, 1):  # noqa: B007 - counted for after the loop
            yield row
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{name}: can't be read: {getattr(error, 'strerror', None) or error}", "Check the file and the disk it is on."
        ) from None
    if not count:
        raise DataError(f"{name}: has no rows", 'Write one row per line, for example {"prompt": "2+2=", "completion": "4"}')


def _of_split(split: str, path: Path, name: str, has_splits: bool) -> Iterator[Row | Refused]:
    """The rows of one split. A file without splits is a whole: its rows are those of any split, unless it must have them."""
    if kind_of_file(path) == ".json" and (value := _splits_of(path, name)):
        if split not in value:
            raise DataError(f"{name}: has no split {shown(split)}; it has {', '.join(value)}", "Name one of them.")
        yield from (_object(item, name, number) for number, item in enumerate(value[split], 1))
        return
    for row in READERS[kind_of_file(path)](path, name):
        if isinstance(row, Refused):
            yield row
        elif "split" not in row.values:
            if has_splits:
                raise RecipeError(
                    f"dataset.eval_split names a split of a hub dataset, of a folder of save_to_disk, or of rows with a column "
                    f"'split'; {name} has none",
                    "Use dataset.eval_path, or hold rows out with dataset.test_split_size.",
                )
            yield row
        elif row.values["split"] == split:
            yield Row(name, row.number, {key: value for key, value in row.values.items() if key != "split"})


def _splits_of(path: Path, name: str) -> dict[str, list[Any]]:
    """Rows by split of a .json file that has more than one; nothing for any other."""
    if _begins_with_lines(path):
        return {}
    value = _whole_value(path, name)
    splits = {key: value[key] for key in SPLITS if isinstance(value.get(key), list)} if isinstance(value, dict) else {}
    return splits if len(splits) > 1 else {}


def kind_of_file(path: Path) -> str:
    """The extension that says how to read a file, in lower case and without .gz or .zst."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSED else path.suffix.lower()


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def _check_text(path: Path, name: str) -> None:
    """Refuse a file that is empty or not UTF-8 text, by its first bytes."""
    with _open(path) as file:
        head = file.read(4096)
    if not head.strip(b"\0"):
        what = "has only zero bytes" if head else "the file is empty (0 bytes)"
        raise DataError(f"{name}: {what}", "Check that it was written or downloaded completely.")
    wide = (
        "UTF-32"
        if head[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
        else "UTF-16"
        if head[:2] in (b"\xff\xfe", b"\xfe\xff")
        else ""
    )
    if not wide and head.count(b"\0") * 4 > len(head):
        wide = "UTF-16LE" if head[1::2].count(b"\0") > head[::2].count(b"\0") else "UTF-16BE"
    if wide:
        fixed = f"fixed{path.suffix}"
        raise DataError(
            f"{name}: is {wide} text, not UTF-8", f"Convert it:  iconv -f {wide} -t UTF-8 {shlex.quote(name)} > {fixed}"
        )
    for magic, kind in _BINARY.items():
        if head.startswith(magic):
            raise DataError(f"{name}: is a {kind} file, not text", "Unpack it, or rename it with its right extension.")


def _json(path: Path, name: str) -> Iterator[Row | Refused]:
    """JSON Lines, an array of rows, one row, or {"data": [rows]}: the content decides, not the extension."""
    return _json_lines(path, name) if _begins_with_lines(path) else _whole_json(path, name)


def _begins_with_lines(path: Path) -> bool:
    with _open(path) as file:
        chunks = (chunk.removeprefix(b"\xef\xbb\xbf").strip() for chunk in iter(lambda: file.readline(LINE_LIMIT), b""))
        first, second = [*itertools.islice(filter(None, chunks), 2), b"", b""][:2]
    a_value_and_more = bool(second) and _parses(first)
    return a_value_and_more or (kind_of_file(path) in (".jsonl", ".ndjson") and not first.startswith(b"["))


def _parses(chunk: bytes) -> bool:
    try:
        json.loads(chunk.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return False
    return True


def _json_lines(path: Path, name: str) -> Iterator[Row | Refused]:
    with _open(path) as file:
        for number, line in _lines(file, name):
            yield _parsed(line.decode("utf-8", "surrogateescape"), name, number)


def _lines(file: IO[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and content of each line that isn't blank; without a byte order mark, LF or CRLF at the end."""
    for number in itertools.count(1):
        line = file.readline(LINE_LIMIT + 1)
        if not line:
            return
        if len(line) > LINE_LIMIT:
            raise DataError(
                f"{name}: line {number} is longer than {LINE_LIMIT // 2**20} MiB",
                "A .jsonl file has one row per line. If this is one JSON array, rename it to .json.",
            )
        line = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip(b" \t\r\n\v\f")
        if line:
            yield number, line


def _parsed(text: str, name: str, number: int) -> Row | Refused:
    """One JSON object. Bytes that are not UTF-8 become lone surrogates, which the checks of the fields report."""
    try:
        value = _loads(text)
    except _TwiceError as twice:
        return Refused(name, number, None, f"has the key {twice} more than once")
    except json.JSONDecodeError as error:
        return Refused(name, number, None, f"is not JSON: {error.msg} (at character {error.pos + 1})")
    except RecursionError:
        return Refused(name, number, None, "is nested too deeply")
    except ValueError:
        return Refused(name, number, None, "has a number with too many digits")
    return _object(value, name, number)


class _TwiceError(Exception):
    """An object has a key more than once; Python would keep the last value without a word."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(shown(next(key for key in keys if keys.count(key) > 1)))
    return made


_loads = json.JSONDecoder(object_pairs_hook=_once).decode


def _object(value: Any, name: str, number: int) -> Row | Refused:
    if isinstance(value, dict):
        return Row(name, number, value)
    kind = {list: "a list", str: "text", type(None): "null"}.get(
        type(value), "a number" if isinstance(value, (int, float)) else ""
    )
    return Refused(name, number, None, f"is {kind}, not an object with named fields")


def _whole_json(path: Path, name: str) -> Iterator[Row | Refused]:
    value = _whole_value(path, name)
    if value is not None:
        yield from (_object(item, name, number) for number, item in enumerate(_rows_in(value, name), 1))


def _whole_value(path: Path, name: str) -> Any:
    """The value of a file of JSON; None without any. Raises DataError."""
    with _open(path) as file:
        data = file.read(JSON_LIMIT + 1)
    if len(data) > JSON_LIMIT:
        raise DataError(
            f"{name}: has more than {JSON_LIMIT // 2**20} MiB of JSON, the limit of a file that is read whole",
            f"Write one row per line:  jq -c '.[]' {shlex.quote(name)} > {path.stem}.jsonl",
        )
    text = data.decode("utf-8-sig", "surrogateescape")
    if not text.strip():
        return None
    try:
        value = _loads(text)
    except _TwiceError as twice:
        raise DataError(f"{name}: an object has the key {twice} more than once", "Keep one of them.") from None
    except json.JSONDecodeError as error:
        where = f"{name}: line {error.lineno}, column {error.colno}"
        raise DataError(
            f"{where}: is not JSON: {error.msg}", "Correct it, or write one row per line in a .jsonl file."
        ) from None
    except RecursionError:
        raise DataError(f"{name}: is nested too deeply to be rows", "Write a list of flat objects.") from None
    except ValueError:
        raise DataError(f"{name}: has a number with too many digits", "Write it as text.") from None
    return [value] if value is None else value


def _rows_in(value: Any, name: str) -> list[Any]:
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise DataError(
            f"{name}: is a single value, not a list of rows", 'Write a list: [{"prompt": ..., "completion": ...}, ...]'
        )
    splits = [key for key in SPLITS if isinstance(value.get(key), list)]
    if len(splits) > 1:
        raise DataError(
            f"{name}: has the splits {', '.join(splits)} in one file",
            f"Hold out the second:  dataset.eval_split={splits[1]}  or train on the first alone:  dataset.split={splits[0]}",
        )
    lists = [key for key in _ROW_LISTS if isinstance(value.get(key), list)]
    if len(lists) == 1:
        return value[lists[0]]
    columns = list(value.values())
    if columns and all(isinstance(column, dict) or _is_plain_list(column) for column in columns):
        raise DataError(
            f"{name}: has columns ({', '.join(shown(key) for key in list(value)[:5])}), not rows",
            'Write rows, with pandas: df.to_json("data.jsonl", orient="records", lines=True)',
        )
    return [value]


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(item, dict) for item in value)


def _csv(path: Path, name: str) -> Iterator[Row | Refused]:
    csv.field_size_limit(LINE_LIMIT)  # the default of 128 KiB is less than one long conversation
    with _text_of(path) as file:  # opened twice: a compressed file can't be read again from its start
        header_line = file.readline(LINE_LIMIT)
    with _text_of(path) as file:
        reader = csv.reader(
            _text_lines(file, name), delimiter="\t" if kind_of_file(path) == ".tsv" else _delimiter(header_line), strict=True
        )
        header: list[str] = []
        while True:
            number = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end" in str(error) or "field larger" in str(error):
                    raise DataError(
                        f"{name}: line {number}: a quote is opened and not closed",
                        'Close it; a quote inside a cell is written "".',
                    ) from None
                yield Refused(name, number, None, f"is not CSV: {error}")
                continue
            if not cells:
                continue
            if not header:
                header = _header(cells, name)
            elif len(cells) != len(header):
                yield Refused(name, number, None, f"has {len(cells)} cell(s), the header has {len(header)}")
            else:
                yield Row(name, number, {key: _cell(cell) for key, cell in zip(header, cells, strict=True)})


def _text_of(path: Path) -> IO[str]:
    return io.TextIOWrapper(_open(path), encoding="utf-8-sig", errors="surrogateescape", newline="")


def _text_lines(file: IO[str], name: str) -> Iterator[str]:
    for number in itertools.count(1):
        line = file.readline(LINE_LIMIT + 1)
        if not line:
            return
        if len(line) > LINE_LIMIT:
            raise DataError(
                f"{name}: line {number} is longer than {LINE_LIMIT // 2**20} MiB", "Check the line ends and quotes."
            )
        yield line


def _delimiter(header: str) -> str:
    """A comma, unless the header has only another usual separator."""
    return next((mark for mark in ",;\t|" if mark in header), ",")


def _header(cells: list[str], name: str) -> list[str]:
    header = [cell.strip() for cell in cells]
    twice = sorted({cell for cell in header if cell and header.count(cell) > 1})
    if twice:
        raise DataError(
            f"{name}: line 1: the header has {', '.join(map(shown, twice))} more than once", "Give each column its own name."
        )
    return header


def _cell(cell: str) -> str | float:
    """The cell's text, or NaN where pandas wrote a missing value."""
    return float("nan") if re.fullmatch(r"nan|NaN|#N/A", cell) else cell


def _text(path: Path, name: str) -> Iterator[Row | Refused]:
    """A row of plain text for each line that isn't blank."""
    with _open(path) as file:
        for number, line in _lines(file, name):
            yield Row(name, number, {"text": line.decode("utf-8", "surrogateescape")})


def _parquet(path: Path, name: str) -> Iterator[Row | Refused]:
    import pyarrow.parquet as parquet

    with _told_as_data_error(path, name, "Parquet"), parquet.ParquetFile(path) as file:
        yield from _rows_of(file.iter_batches(batch_size=_rows_at_once(file.metadata, name)), name)


def _arrow(path: Path, name: str) -> Iterator[Row | Refused]:
    """Arrow's stream, as datasets writes it, or its file format."""
    import pyarrow as pa

    with _told_as_data_error(path, name, "Arrow"), pa.memory_map(str(path)) as file:
        yield from _rows_of(_batches(file), name)


@contextlib.contextmanager
def _told_as_data_error(path: Path, name: str, kind: str) -> Iterator[None]:
    """Raises DataError where the file is empty or pyarrow can't read it."""
    import pyarrow as pa

    if not path.stat().st_size:
        raise DataError(f"{name}: the file is empty (0 bytes)", "Check that it was written or downloaded completely.")
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).split("\n")[0][:200]
        raise DataError(
            f"{name}: can't be read as {kind}: {shown(reason, 200)}", "Check that it was downloaded completely."
        ) from None


def _rows_of(batches: Iterable[Any], name: str) -> Iterator[Row | Refused]:
    number = 0
    for batch in batches:
        for index in range(batch.num_rows):
            number += 1
            yield _table_row(batch.slice(index, 1), name, number)


def _batches(file: Any) -> Iterator[Any]:
    import pyarrow as pa

    if file.read(6) == b"ARROW1":
        table = pa.ipc.open_file(file)
        batches: Iterable[Any] = map(table.get_batch, range(table.num_record_batches))
    else:
        file.seek(0)
        batches = pa.ipc.open_stream(file)
    for batch in batches:
        batch.validate(full=True)
        yield batch


def _rows_at_once(facts: Any, name: str) -> int:
    """Rows to read at a time. Raises DataError where a few bytes stand for rows that would fill the memory."""
    groups = [facts.row_group(index) for index in range(facts.num_row_groups)]
    columns = ((group, group.column(index)) for group in groups for index in range(group.num_columns))
    values = max((column.num_values / max(1, group.num_rows) for group, column in columns), default=0)
    if values > _MOST_VALUES:
        raise DataError(f"{name}: its rows have {values:,.0f} values each", "Check what wrote it: no row of text is so long.")
    return max(1, min(256, int(_MOST_VALUES / max(1, values))))


def _table_row(row: Any, name: str, number: int) -> Row | Refused:
    try:
        return Row(name, number, {key: without_nothing(value) for key, value in row.to_pylist()[0].items()})
    except (UnicodeDecodeError, ValueError, OverflowError) as error:
        return Refused(name, number, None, f"has a value that can't be read: {error}")


def without_nothing(value: Any) -> Any:
    """The value without the None fields that columnar formats add to objects."""
    if isinstance(value, dict):
        return {key: without_nothing(part) for key, part in value.items() if part is not None}
    return [without_nothing(part) for part in value] if isinstance(value, list) else value


READERS = {
    ".jsonl": _json, ".ndjson": _json, ".json": _json, ".csv": _csv, ".tsv": _csv, ".txt": _text, ".parquet": _parquet,
    ".arrow": _arrow,
}  # fmt: skip
