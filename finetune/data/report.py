"""Report on the rows of a dataset: used, refused, lengths, trained tokens."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from finetune.data.shards import PictureSummary


@dataclass(frozen=True)
class Refused:
    """A row that can't be trained on."""

    file: str
    row: int  # counts from 1; in .jsonl and .csv files it is the line
    field: str | None
    reason: str

    @property
    def kind(self) -> str:
        """Return the reason without the row's details; rows of a kind have the same remedy."""
        name = re.sub(r"\[\d+\]", "[]", self.field) if self.field else ""
        reason = re.split(r"[;:(]| \d", self.reason, maxsplit=1)[0].strip()
        return f"{name} {reason}" if name else reason

    def __str__(self) -> str:
        field_name = f"{self.field}: " if self.field else ""
        return f"{self.file}, row {self.row}: {field_name}{self.reason}"


@dataclass(frozen=True)
class Finding:
    """A property of the data to know before training."""

    kind: str
    text: str  # `{rows}` is replaced by the number of rows
    rows: int = 0
    first: tuple[str, ...] = ()  # locations of the first three rows
    fix: str = ""
    blocks: bool = False  # whether a run is refused unless the recipe accepts the finding

    def __str__(self) -> str:
        text = self.text.format(rows=f"{self.rows:,} row(s)")
        text = f"{text} (first: {'; '.join(self.first)})" if self.first else text
        return f"{text}. {self.fix}" if self.fix else text


@dataclass(frozen=True)
class DataReport:
    """The rows of one split; lengths and token counts are after truncating and dropping."""

    files: tuple[str, ...]
    format: str
    rows_read: int  # rows_used + rows_refused + rows_held_out + rows_dropped
    rows_used: int
    rows_refused: tuple[Refused, ...] = ()
    rows_held_out: int = 0
    rows_too_long: int = 0
    rows_truncated: int = 0
    rows_chunked: int = 0  # of plain text, cut into several sequences
    sequences: int = 0  # more than rows_used where a chat template needs one per answer
    total_tokens: int = 0
    trained_tokens: int = 0
    lengths: dict[str, int] = field(default_factory=dict)  # p50, p95, p99, max in tokens; empty without rows
    unused_columns: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)  # field of the format -> column of the file
    findings: tuple[Finding, ...] = ()
    pictures: PictureSummary | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(str(finding) for finding in self.findings)

    @property
    def rows_dropped(self) -> int:
        """Return the number of rows left out for their length."""
        return self.rows_too_long - self.rows_truncated

    def account(self) -> str:
        """Return a sentence on rows used, refused, dropped and held out."""
        kinds = Counter(row.kind for row in self.rows_refused)
        reasons = ", ".join(f"{count:,} x {kind}" for kind, count in kinds.most_common(3))
        if len(kinds) > 3:
            reasons += ", ..."
        counts = {
            f"refused ({reasons})": len(self.rows_refused),
            "left out (longer than max_length)": self.rows_dropped,
            "held out": self.rows_held_out,
        }
        uses = [f"{self.rows_used:,} used", *(f"{count:,} {use}" for use, count in counts.items() if count)]
        sentence = f"{self.rows_read:,} rows read: {', '.join(uses)}"
        if self.rows_chunked:
            sentence += f"; {self.rows_chunked:,} cut into chunks, {self.sequences:,} sequences in all"
        return sentence

    @property
    def trained_token_share(self) -> float | None:
        """Return trained tokens / all tokens; None without tokens."""
        return self.trained_tokens / self.total_tokens if self.total_tokens else None

    def as_json(self) -> dict[str, Any]:
        """Return the content of `finetune data --json`."""
        counts = {"trained_token_share": self.trained_token_share, "rows_dropped": self.rows_dropped}
        return asdict(self) | counts | {"warnings": self.warnings, "account": self.account()}


def refusal_lines(refused: list[Refused], rows_read: int, max_reasons: int = 10) -> list[str]:
    """Return a line on refused rows, and a line for each reason."""
    groups: dict[str, list[Refused]] = {}
    for row in refused:
        groups.setdefault(row.kind, []).append(row)
    by_count = sorted(groups.values(), key=len, reverse=True)
    lines = [f"{len(refused):,} of {rows_read:,} row(s) can't be trained on:"]
    for rows in by_count[:max_reasons]:
        field = f"{rows[0].field}: " if rows[0].field else ""
        locations = format_locations([(row.file, row.row) for row in rows])
        lines.append(f"  {len(rows):,} x {field}{rows[0].reason} ({locations})" if len(rows) > 1 else f"  {rows[0]}")
    if len(by_count) > max_reasons:
        other_rows = sum(map(len, by_count[max_reasons:]))
        lines.append(f"  and {len(by_count) - max_reasons:,} other reason(s), for {other_rows:,} row(s)")
    return lines


def format_locations(rows: list[tuple[str, int]]) -> str:
    """Return the first three rows as `a.jsonl, row 2, 5, 9, ...`."""
    files: dict[str, list[str]] = {}
    for file, row in rows[:3]:
        files.setdefault(file, []).append(str(row))
    listing = "; ".join(f"{file}, row {', '.join(numbers)}" for file, numbers in files.items())
    return f"{listing}, ..." if len(rows) > 3 else listing


def printable(text: str, limit: int = 60) -> str:
    """Make untrusted text safe to print: no control characters or lone surrogates, at most `limit` characters."""
    safe = text if text.isprintable() else ascii(text)[1:-1]
    return safe if len(safe) <= limit else f"{safe[: limit - 3]}..."


def override(name: str, value: Any) -> str:
    """Return a setting of `dataset` as an argument to type."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6).strip()
    if "'" in text or re.search(r"\d[eE]\d", text):  # 1e3 is a number in YAML 1.2
        text = json.dumps(value).replace("\x7f", "\\u007f")  # JSON is YAML, too, and its quotes are not the shell's
    return shlex.quote(f"dataset.{name}={text}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the error's kind."""
    lines = [line for line in str(error).split("\n") if line.strip()]
    return printable(lines[0], 300) if lines else type(error).__name__
