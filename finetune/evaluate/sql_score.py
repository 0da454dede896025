"""Score of a SQL query by its result: both queries read the same SQLite database, and their rows are compared."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.errors import CommandError, DataError
from finetune.evaluate.scorers import RowScore

#: Seconds and rows of one query.
_QUERY_S, _MAX_ROWS = 10.0, 100_000
#: What a query may do: read tables and call functions; not write, attach another file or change settings.
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
_FENCE = re.compile(r"```(?:sql|sqlite)?\s*\n(.*?)```", re.S | re.I)
_ORDER = re.compile(r"\border\s+by\b(?!.*\))", re.S | re.I)


class SqlScore:
    """Scores queries on the SQLite file `path`, which is opened for reading only. Raises CommandError if it can't be."""

    def __init__(self, path: str) -> None:
        if not Path(path).is_file():
            raise CommandError(f"there is no file {path}", "Give the SQLite file that the queries read: --database FILE.")
        self._uri = f"{Path(path).resolve().as_uri()}?mode=ro"
        self._expected: dict[str, list[tuple[Any, ...]]] = {}
        try:
            self._rows("SELECT count(*) FROM sqlite_master")
        except sqlite3.Error as error:
            raise CommandError(f"{path} is no SQLite database: {error}", "Give another --database.") from None

    def __call__(self, _: str, expected: str, answer: str) -> RowScore:
        """1 for the same rows, in the same order if the expected query has one. `valid`: whether the answer's query runs.

        Raises DataError for an expected query that does not run.
        """
        if expected not in self._expected:
            try:
                self._expected[expected] = self._rows(_query(expected))
            except sqlite3.Error as error:
                problem = f"the expected query does not run: {error}: {expected[:100]!r}"
                raise DataError(problem, "Give the database that belongs to these rows.") from None
        try:
            rows = self._rows(_query(answer))
        except (sqlite3.Error, sqlite3.Warning, ValueError):
            return RowScore(0.0, {}, False)
        target = self._expected[expected]
        equal = rows == target if _ORDER.search(_query(expected)) else Counter(rows) == Counter(target)
        return RowScore(float(equal), {}, True)

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        with self._connection() as connection:
            rows = connection.execute(query).fetchmany(_MAX_ROWS + 1)
        if len(rows) > _MAX_ROWS:
            raise sqlite3.OperationalError(f"more than {_MAX_ROWS:,} rows")
        return rows

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own for each query, which can only read, and not for long."""
        deadline = time.monotonic() + _QUERY_S
        with contextlib.closing(sqlite3.connect(self._uri, uri=True)) as connection:
            connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
            connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
            yield connection


def _query(text: str) -> str:
    """The query in an answer: in its first code block, or all of it."""
    block = _FENCE.search(text)
    query = (block[1] if block else text).strip().rstrip(";")
    if not query:
        raise sqlite3.OperationalError("no query")
    return query
