"""The data report: rows used and refused (with reasons), lengths, trained tokens."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Refused:
    """A row that can't be trained on. `row` counts from 1; for .jsonl and .csv it is the line in the file."""

    file: str
    row: int
    field: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {f'{self.field}: ' if self.field else ''}{self.reason}"


@dataclass(frozen=True)
class DataReport:
    """The rows of one split (training or held out). Lengths and token counts are after truncating and dropping rows.

    rows_read = rows_used + rows_refused + rows_held_out + rows dropped for their length (rows_too_long - rows_truncated).
    """

    files: tuple[str, ...]
    format: str
    rows_read: int
    rows_used: int
    rows_refused: tuple[Refused, ...] = ()
    rows_held_out: int = 0
    rows_too_long: int = 0
    rows_truncated: int = 0
    tokens_dropped: int = 0  # in rows dropped or truncated for their length
    duplicate_rows: int = 0  # equal to an earlier row; kept
    sequences: int = 0  # more than rows_used where a chat template needs one per answer
    total_tokens: int = 0
    trained_tokens: int = 0
    lengths: dict[str, int] = field(default_factory=dict)  # p50, p95, p99, max in tokens; empty without rows
    unused_columns: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def trained_token_share(self) -> float | None:
        """Trained tokens / all tokens; None without tokens."""
        return self.trained_tokens / self.total_tokens if self.total_tokens else None

    def as_json(self) -> dict[str, Any]:
        """The content of `finetune data --json`: this class's fields by name, and `trained_token_share`."""
        return {**asdict(self), "trained_token_share": self.trained_token_share}


def percentiles(lengths: list[int]) -> dict[str, int]:
    """p50, p95, p99 (nearest rank) and max of `lengths`; empty for no lengths."""
    if not lengths:
        return {}
    ordered = sorted(lengths)
    ranks = {f"p{share}": ordered[-(-len(ordered) * share // 100) - 1] for share in (50, 95, 99)}
    return {**ranks, "max": ordered[-1]}


def refusal_lines(refused: list[Refused], shown: int = 20) -> list[str]:
    """A line for each of the first `shown` refused rows, then the counts of all reasons."""
    lines = [str(row) for row in refused[:shown]]
    if len(refused) > shown:
        reasons = Counter(_kind(row) for row in refused)
        kinds = ", ".join(f"{count:,} x {reason}" for reason, count in reasons.most_common(5))
        lines.append(f"... {len(refused):,} rows in all: {kinds}{', ...' if len(reasons) > 5 else ''}")
    return lines


def _kind(row: Refused) -> str:
    """The reason without the details of the row."""
    name = re.sub(r"\[\d+\]", "[]", row.field) if row.field else ""
    reason = re.split(r"[;:(]| \d", row.reason, maxsplit=1)[0].strip()
    return f"{name} {reason}" if name else reason


def shown(text: str, limit: int = 60) -> str:
    """Untrusted text made safe to print: no control characters or lone surrogates, at most `limit` characters."""
    safe = text if text.isprintable() else ascii(text)[1:-1]
    return safe if len(safe) <= limit else f"{safe[: limit - 3]}..."
