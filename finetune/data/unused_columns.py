"""Decide whether unused columns and message fields may be left out without asking."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.data.checks import SPLITS, Values
from finetune.data.column_kinds import describe, is_harmless, kinds_of
from finetune.data.column_semantics import FIXES, changes_meaning, changes_message, meaning_of
from finetune.data.report import printable

#: Different values that are counted. Short texts that differ as often are no names of sources.
_MAX_VALUES = 100
_FIRST_ROWS = 3
#: Kinds of unused names: those that say that they change the meaning of a row, and other columns and message fields.
NAMED, COLUMNS, FIELDS = "named", "columns", "message fields"


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
    #: Usable rows, and their messages.
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys((NAMED, COLUMNS, FIELDS), 0))
    uses: dict[str, dict[str, ColumnUse]] = field(default_factory=lambda: {NAMED: {}, COLUMNS: {}, FIELDS: {}})

    def merge(self, other: UnusedColumns) -> None:
        for kind, uses in other.uses.items():
            self.totals[kind] += other.totals[kind]
            for name, use in uses.items():
                self._use(kind, name).merge(use)

    def _use(self, kind: str, name: str) -> ColumnUse:
        return self.uses[kind].setdefault(name, ColumnUse())

    def add_named(self, unread: Values, number: int) -> Values:
        """Count columns whose names say that they change the meaning, and return the undecided columns."""
        undecided = {}
        for column, value in unread.items():
            decision = changes_meaning(column, value, self.format)
            if decision:
                self._use(NAMED, column).add(number, value=value)
            elif decision is None:
                undecided[column] = value
        return undecided

    def add_messages(self, messages: list[Values], number: int) -> None:
        for name in {name: None for message in messages for name in message if changes_message(name, message[name])}:
            self._use(NAMED, name).add(number)
        for message in messages:
            undecided = {name: value for name, value in message.items() if changes_meaning(name, value, self.format) is None}
            self.add(FIELDS, undecided, number)

    def add(self, kind: str, undecided: Values, number: int, texts: Sequence[str] = ()) -> None:
        """Add undecided columns or fields of a usable row; `texts` are read from the row."""
        self.totals[kind] += 1
        for name, value in undecided.items():
            use, kinds = self._use(kind, name), kinds_of(name, value, texts)
            # the column repeats all texts that are read, as Alpaca's `text` does
            if len(texts) > 1 and isinstance(value, str) and texts[-1] in value and all(text in value for text in texts):
                kinds = {"copy"}
            if kinds:
                use.add(number, kinds, value)

    @property
    def stops_run(self) -> bool:
        """Return whether `asked` will name a column, whatever rows follow."""
        return bool(self.asked(None))

    def asked(self, rows_read: int | None) -> dict[str, ColumnUse]:
        """Return the columns that stop a run; None if more rows follow."""
        uses = ((kind, name, use) for kind, uses in self.uses.items() for name, use in uses.items())
        return {name: use for kind, name, use in uses if self._stops(kind, name, use, rows_read)}

    def _stops(self, kind: str, name: str, use: ColumnUse, rows_read: int | None) -> bool:
        all_rows = rows_read is not None
        if kind == NAMED:
            # a `split` in all rows is no mixture
            return name != "split" or (all_rows and use.count != rows_read)
        # short texts that nearly all differ are prose
        is_prose = all_rows and "label" in use.kinds and len(use.values) >= min(_MAX_VALUES, max(4, use.count // 2))
        kinds = use.kinds | {"text"} if is_prose else use.kinds
        # a single row can't show that a value is constant
        differ = len(use.values) > 1 or use.count < max(self.totals[kind], 1 + all_rows)  # or some rows have none
        is_flag = kind == FIELDS and bool(kinds & {"truth", "bit"})
        return use.count > 0 and (differ or is_flag) and not is_harmless(name, kinds, has_answer=self.format != "text")

    def problems(self, asked: dict[str, ColumnUse]) -> list[str]:
        """Return a line for each known name, and a line for all unknown names."""
        lines = [
            f"{self.file}: '{printable(name)}' is not used, and it looks like {meaning_of(name)}: {use.count:,} row(s), first "
            f"{', '.join(map(str, use.first_rows))}{', ...' if use.count > len(use.first_rows) else ''}"
            for name, use in asked.items()
            if name in self.uses[NAMED]
        ]
        for kind in (COLUMNS, FIELDS):
            uses = self.uses[kind]
            described = [f"{printable(name)} ({describe(use.kinds)})" for name, use in asked.items() if uses.get(name) is use]
            if described:
                lines.append(f"{self.file}: unused {kind} may change what the model learns: {', '.join(described)}")
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
