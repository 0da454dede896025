"""Progress of reading and tokenising, as text."""

from __future__ import annotations

import time
from collections.abc import Callable

from finetune.units import format_seconds

#: Seconds between two reports, and until the first.
_EVERY_S = 0.5


class RowProgress:
    """Reports count, rate and time left twice a second; called with the tokenised and all rows (None: unknown)."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report_text = report
        self._started_s = self._reported_s = time.monotonic()

    def __call__(self, count: int, total: int | None) -> None:
        """Report, unless the last report is less than half a second ago."""
        now_s = time.monotonic()
        if now_s - self._reported_s < _EVERY_S:
            return
        self._reported_s = now_s
        rate = count / (now_s - self._started_s)
        message = f"tokenising rows: {count:,}{f' of {total:,}' if total else ''}, {rate:,.0f} per second"
        if total and count and total > count:
            message += f", {format_seconds((total - count) / rate)} left"
        self._report_text(message)
