"""Decide whether unused columns and message fields may be left out without asking."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from finetune.data.checks import SPLITS, Values
from finetune.data.column_kinds import describe, is_harmless, kinds_of
from finetune.data.column_semantics import FIXES, changes_meaning, changes_message, meaning_of
from finetune.data.report import printable

#: Different values that are counted. Short texts that differ as often are no names of sources.
_MAX_VALUES = 100
_FIRST_ROWS = 3


@dataclass
class ColumnUse:
    """Rows, or messages of a field, with a value in an unused column."""

    count: int = 0
    first_rows: list[int] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)

    def add(self, number: int, kinds: Iterable[str] = (), value: Any = None) -> None:
        self.count += 1
        if len(self.first_rows) < _FIRST_ROWS and number not in self.first_rows:
            self.first_rows.append(number)
        self.kinds.update(kinds)
        # two values show that a column isn't constant; more are counted only for short texts, which may be prose
        if len(self.values) < 2 or (len(self.values) < _MAX_VALUES and "label" in self.kinds and "text" not in self.kinds):
            self.values.add(_digest(value))

    def merge(self, other: ColumnUse) -> None:
        self.count += other.count
        self.first_rows = sorted({*self.first_rows, *other.first_rows})[:_FIRST_ROWS]
        self.kinds |= other.kinds
        self.values |= other.values


@dataclass
class UnusedColumns:
    """Unused columns and message fields of a source."""

    file: str
    format: str
    rows: int = 0
    messages: int = 0
    #: Columns and fields whose names say that they change the meaning of a row.
    meanings: dict[str, ColumnUse] = field(default_factory=dict)
    #: All other columns, and all other fields of messages.
    columns: dict[str, ColumnUse] = field(default_factory=dict)
    fields: dict[str, ColumnUse] = field(default_factory=dict)

    def merge(self, other: UnusedColumns) -> None:
        self.rows += other.rows
        self.messages += other.messages
        for kind in ("meanings", "columns", "fields"):
            for name, use in getattr(other, kind).items():
                getattr(self, kind).setdefault(name, ColumnUse()).merge(use)

    def add_meanings(self, unread: Values, number: int) -> Values:
        """Count columns whose names say that they change the meaning, and return the undecided columns."""
        undecided = {}
        for column, value in unread.items():
            decision = changes_meaning(column, value, self.format)
            if decision:
                self.meanings.setdefault(column, ColumnUse()).add(number, value=value)
            elif decision is None:
                undecided[column] = value
        return undecided

    def add_row(self, undecided: Values, number: int, texts: list[str]) -> None:
        """Add undecided columns of a usable row; `texts` are read from the row."""
        self.rows += 1
        for column, value in undecided.items():
            _add(self.columns, column, value, number, texts)

    def add_messages(self, messages: list[Values], number: int) -> None:
        self.messages += len(messages)
        for name in {name: None for message in messages for name in message if changes_message(name, message[name])}:
            self.meanings.setdefault(name, ColumnUse()).add(number)
        for message in messages:
            for name, value in message.items():
                if changes_meaning(name, value, self.format) is None:
                    _add(self.fields, name, value, number, [])

    @property
    def stops_run(self) -> bool:
        """Return whether `asked` will name a column, whatever rows follow."""
        return bool({*self.meanings} - {"split"} or self._asked(all_rows=False))

    def asked(self, rows_read: int) -> dict[str, ColumnUse]:
        """Return the columns that stop a run."""
        # a `split` in all rows is no mixture
        meanings = {name: use for name, use in self.meanings.items() if name != "split" or use.count != rows_read}
        return {**meanings, **self._asked(all_rows=True)}

    def _asked(self, *, all_rows: bool) -> dict[str, ColumnUse]:
        asked = {}
        for uses, total in ((self.columns, self.rows), (self.fields, self.messages)):
            for name, use in uses.items():
                # short texts that nearly all differ are prose
                is_prose = all_rows and "label" in use.kinds and len(use.values) >= min(_MAX_VALUES, max(4, use.count // 2))
                kinds = use.kinds | {"text"} if is_prose else use.kinds
                # a single row can't show that a value is constant
                differ = len(use.values) > 1 or use.count < max(total, 1 + all_rows)  # or some rows have none
                is_flag = uses is self.fields and bool(kinds & {"truth", "bit"})
                if use.count and (differ or is_flag) and not is_harmless(name, kinds, has_answer=self.format != "text"):
                    asked[name] = use
        return asked

    def problems(self, asked: dict[str, ColumnUse]) -> list[str]:
        """Return a line for each known name, and a line for all unknown names."""
        lines = [
            f"{self.file}: '{printable(name)}' is not used, and it looks like {meaning_of(name)}: {use.count:,} row(s), first "
            f"{', '.join(map(str, use.first_rows))}{', ...' if use.count > len(use.first_rows) else ''}"
            for name, use in asked.items()
            if name in self.meanings
        ]
        for owner, uses in (("columns", self.columns), ("message fields", self.fields)):
            described = [f"{printable(name)} ({describe(use.kinds)})" for name, use in asked.items() if uses.get(name) is use]
            if described:
                lines.append(f"{self.file}: unused {owner} may change what the model learns: {', '.join(described)}")
        return lines


def fixes_of(asked: dict[str, ColumnUse], file: str) -> list[str]:
    """Return fixes for columns and fields with known names."""
    fixes: dict[str, str] = {}
    for name, use in asked.items():
        meaning = meaning_of(name)
        split = next((split for split in SPLITS if _digest(split) in use.values), "test")
        text = FIXES.get(meaning, "").replace("NAME", json.dumps(name)).replace("SPLIT", split)
        fixes.setdefault(meaning, text.replace("FILE", shlex.quote(file)))
    return [fix for fix in fixes.values() if fix]


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _add(uses: dict[str, ColumnUse], name: str, value: Any, number: int, texts: list[str]) -> None:
    use = uses.get(name) or uses.setdefault(name, ColumnUse())
    kinds = kinds_of(name, value, texts)
    # the column repeats all texts that are read, as Alpaca's `text` does
    if len(texts) > 1 and isinstance(value, str) and texts[-1] in value and all(text in value for text in texts):
        kinds = {"copy"}
    if kinds:
        use.add(number, kinds, value)
