"""Decide whether unused columns and message fields may be left out without asking."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.data.checks import SPLITS, Values
from finetune.data.column_kinds import describe, is_harmless, kinds_of
from finetune.data.column_semantics import FIXES, changes_meaning, meaning_of
from finetune.data.report import printable

#: Different values that are counted. Short texts that differ as often are no names of sources.
_MAX_VALUES = 100
_FIRST_ROWS = 3
COLUMNS, FIELDS = "columns", "message fields"
#: The kind of values whose column's name says that they change the meaning of a row.
NAMED = "named"


@dataclass
class ColumnUse:
    """Rows, or messages of a field, with a value in an unused column."""

    count: int = 0
    first_rows: list[int] = field(default_factory=list)
    last_row: int = 0
    kinds: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)

    def add(self, number: int, kinds: set[str], value: Any) -> None:
        # known names are counted by row
        self.count += kinds != {NAMED} or number != self.last_row
        self.last_row = number
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
    totals: dict[str, int] = field(default_factory=lambda: {COLUMNS: 0, FIELDS: 0})
    uses: dict[str, dict[str, ColumnUse]] = field(default_factory=lambda: {COLUMNS: {}, FIELDS: {}})

    def merge(self, other: UnusedColumns) -> None:
        for owner, uses in other.uses.items():
            self.totals[owner] += other.totals[owner]
            for name, use in uses.items():
                self.uses[owner].setdefault(name, ColumnUse()).merge(use)

    def add(self, owner: str, unread: Values, number: int, texts: Sequence[str] = ()) -> None:
        """Add unread columns or fields of a usable row; `texts` are read from the row."""
        self.totals[owner] += 1
        for name, value in unread.items():
            changes = changes_meaning(name, value, self.format, in_message=owner == FIELDS)
            if changes is False:
                continue
            use, kinds = self.uses[owner].setdefault(name, ColumnUse()), {NAMED} if changes else kinds_of(name, value, texts)
            # the column repeats all texts that are read, as Alpaca's `text` does
            if len(texts) > 1 and isinstance(value, str) and texts[-1] in value and all(text in value for text in texts):
                kinds = kinds & {NAMED} or {"copy"}
            if kinds:
                use.add(number, kinds, value)

    @property
    def stops_run(self) -> bool:
        """Return whether `asked` will name a column, whatever rows follow."""
        return bool(self.asked(None))

    def asked(self, rows_read: int | None) -> dict[str, ColumnUse]:
        """Return the columns that stop a run, those with known names first; None if more rows follow."""
        uses = ((owner, name, use) for owner, uses in self.uses.items() for name, use in uses.items())
        asked = [(name, use) for owner, name, use in uses if self._stops(owner, name, use, rows_read)]
        return dict(sorted(asked, key=lambda item: NAMED not in item[1].kinds))

    def _stops(self, owner: str, name: str, use: ColumnUse, rows_read: int | None) -> bool:
        all_rows = rows_read is not None
        if NAMED in use.kinds:
            # a `split` in all rows is no mixture
            return name != "split" or (all_rows and (use.count, use.kinds) != (rows_read, {NAMED}))
        # short texts that nearly all differ are prose
        is_prose = all_rows and "label" in use.kinds and len(use.values) >= min(_MAX_VALUES, max(4, use.count // 2))
        kinds = use.kinds | {"text"} if is_prose else use.kinds
        # a single row can't show that a value is constant
        differ = len(use.values) > 1 or use.count < max(self.totals[owner], 1 + all_rows)  # or some rows have none
        is_flag = owner == FIELDS and bool(kinds & {"truth", "bit"})
        return use.count > 0 and (differ or is_flag) and not is_harmless(name, kinds, has_answer=self.format != "text")

    def problems(self, asked: dict[str, ColumnUse]) -> list[str]:
        """Return a line for each known name, and a line for all unknown names."""
        lines = [
            f"{self.file}: '{printable(name)}' is not used, and it looks like {meaning_of(name)}: {use.count:,} row(s), first "
            f"{', '.join(map(str, use.first_rows))}{', ...' if use.count > len(use.first_rows) else ''}"
            for name, use in asked.items()
            if NAMED in use.kinds
        ]
        for owner, uses in self.uses.items():
            unknown = {name: use for name, use in asked.items() if uses.get(name) is use and NAMED not in use.kinds}
            described = [f"{printable(name)} ({describe(use.kinds)})" for name, use in unknown.items()]
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
