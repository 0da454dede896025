"""Columns of rows and fields of messages that aren't read: whether they may be left out without asking."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from finetune.data.checks import SPLITS
from finetune.data.column_kinds import describe, is_harmless, kinds_of
from finetune.data.column_semantics import FIXES, MEANINGS, changes_meaning
from finetune.data.report import printable

#: Different values that are counted. Short texts that differ as often are no names of sources.
_MAX_VALUES = 100
_FIRST_ROWS = 3


@dataclass
class ColumnUse:
    """Rows (of a field: messages) with a value in a column that isn't read; the kinds of the values, and how they differ."""

    count: int = 0
    first_rows: list[int] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)

    def add(self, number: int, kinds: Iterable[str] = (), value: Any = None) -> None:
        """Count a row, and its value if it has kinds."""
        self.count += 1
        if len(self.first_rows) < _FIRST_ROWS and number not in self.first_rows:
            self.first_rows.append(number)
        self.kinds.update(kinds)
        if len(self.values) < 2 or (len(self.values) < _MAX_VALUES and "label" in self.kinds and "text" not in self.kinds):
            self.values.add(_digest(value))

    def merge(self, other: ColumnUse) -> None:
        """Add the counts of other rows."""
        self.count += other.count
        self.first_rows = sorted({*self.first_rows, *other.first_rows})[:_FIRST_ROWS]
        self.kinds |= other.kinds
        self.values |= other.values

    def final_kinds(self) -> set[str]:
        """The kinds, once all rows are known: short texts of which nearly each is another are texts."""
        is_prose = "label" in self.kinds and len(self.values) >= min(_MAX_VALUES, max(4, self.count // 2))
        return self.kinds | {"text"} if is_prose else self.kinds


@dataclass
class UnusedValues:
    """What some rows of a source have that isn't read. Those of several batches are merged.

    `meanings`: columns and fields whose name says that they change the meaning; `columns`, `fields`: all others.
    """

    rows: int = 0
    messages: int = 0
    meanings: dict[str, ColumnUse] = field(default_factory=dict)
    columns: dict[str, ColumnUse] = field(default_factory=dict)
    fields: dict[str, ColumnUse] = field(default_factory=dict)

    def merge(self, other: UnusedValues) -> None:
        """Add those of other rows."""
        self.rows += other.rows
        self.messages += other.messages
        for kind in ("meanings", "columns", "fields"):
            for name, use in getattr(other, kind).items():
                getattr(self, kind).setdefault(name, ColumnUse()).merge(use)


class UnusedColumns:
    """Collects what the rows of a source have in columns and fields of messages that aren't read."""

    def __init__(self, file: str, format_name: str) -> None:
        self._file, self._format = file, format_name
        self.values = UnusedValues()

    def add_meanings(self, unread: dict[str, Any], number: int) -> dict[str, Any]:
        """Count the columns of a row that aren't read and whose names say that they change the meaning; returns those
        whose names don't decide it."""
        undecided = {}
        for column, value in unread.items():
            decision = changes_meaning(column, value, self._format)
            if decision:
                self.values.meanings.setdefault(column, ColumnUse()).add(number, value=value)
            elif decision is None:
                undecided[column] = value
        return undecided

    def add_field(self, name: str, number: int) -> None:
        """Count a field of a message whose name says that it changes the meaning."""
        self.values.meanings.setdefault(name, ColumnUse()).add(number)

    def add_row(self, undecided: dict[str, Any], number: int, texts: list[str]) -> None:
        """Add the other columns of a row that can be trained on. `texts`: what is read of it."""
        self.values.rows += 1
        for column, value in undecided.items():
            _add(self.values.columns, column, value, number, texts)

    def add_messages(self, messages: list[dict[str, Any]], number: int) -> None:
        """Add the fields of a row's messages that aren't read; one mapping for each message."""
        self.values.messages += len(messages)
        for message in messages:
            for name, value in message.items():
                if changes_meaning(name, value, self._format) is None:
                    _add(self.values.fields, name, value, number, [])

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, to print."""
        return (*map(printable, self.values.columns), *(f"messages[].{printable(name)}" for name in self.values.fields))

    @property
    def stops_run(self) -> bool:
        """Whether `asked` will name some, whatever rows follow."""
        return bool(set(self.values.meanings) - {"split"}) or any(
            self._is_asked(name, use, use.kinds, total, is_field) for name, use, total, is_field in self._general_uses()
        )

    def asked(self, rows_read: int) -> dict[str, ColumnUse]:
        """Those that stop a run. A `split` in all `rows_read` rows is no mixture; a single row can't show what is constant."""
        meanings = {name: use for name, use in self.values.meanings.items() if name != "split" or use.count != rows_read}
        others = {
            name: use
            for name, use, total, is_field in self._general_uses()
            if self._is_asked(name, use, use.final_kinds(), max(total, 2), is_field)
        }
        return {**meanings, **others}

    def problems(self, asked: dict[str, ColumnUse]) -> list[str]:
        """What to say about them: a line for each whose name is known, and one line for the others."""
        lines = [
            f"{self._file}: '{printable(name)}' isn't used, and it says {MEANINGS[name.lower()]}: {_rows(use)}"
            for name, use in asked.items()
            if name in self.values.meanings
        ]
        others = {name: use for name, use in asked.items() if name not in self.values.meanings}
        for owner, uses in (("columns", self.values.columns), ("fields of messages", self.values.fields)):
            described = [f"{printable(name)} ({describe(use.kinds)})" for name, use in others.items() if uses.get(name) is use]
            if described:
                lines.append(f"{self._file}: {owner} that aren't used may change what is learnt: {', '.join(described)}")
        return lines

    def _general_uses(self) -> list[tuple[str, ColumnUse, int, bool]]:
        return [
            *((name, use, self.values.rows, False) for name, use in self.values.columns.items()),
            *((name, use, self.values.messages, True) for name, use in self.values.fields.items()),
        ]

    def _is_asked(self, name: str, use: ColumnUse, kinds: set[str], total: int, is_field: bool) -> bool:
        if not use.count or is_harmless(name, kinds, has_answer=self._format != "text"):
            return False
        differ = len(use.values) > 1 or use.count < total  # or some rows have none
        return differ or (is_field and bool(kinds & {"truth", "bit"}))


def fixes_of(asked: dict[str, ColumnUse], file: str) -> list[str]:
    """What to do about columns and fields whose names are known."""
    fixes: dict[str, str] = {}
    for name, use in asked.items():
        meaning = MEANINGS.get(name.lower(), "")
        split = next((split for split in SPLITS if _digest(split) in use.values), "test")
        text = FIXES.get(meaning, "").replace("NAME", json.dumps(name)).replace("SPLIT", split)
        fixes.setdefault(meaning, text.replace("FILE", shlex.quote(file)))
    return [fix for fix in fixes.values() if fix]


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _rows(use: ColumnUse) -> str:
    first_rows = ", ".join(map(str, use.first_rows)) + (", ..." if use.count > len(use.first_rows) else "")
    return f"{use.count:,} row(s), the first {first_rows}"


def _add(uses: dict[str, ColumnUse], name: str, value: Any, number: int, texts: list[str]) -> None:
    """Count a value. A column that has all of `texts` in one, as Alpaca's `text` does, repeats them."""
    use = uses.get(name) or uses.setdefault(name, ColumnUse())
    kinds = kinds_of(name, value, texts)
    if len(texts) > 1 and isinstance(value, str) and texts[-1] in value and all(text in value for text in texts):
        kinds = {"copy"}
    if kinds:
        use.add(number, kinds, value)
