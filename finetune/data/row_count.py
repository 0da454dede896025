"""How far reading and tokenising is, in words."""

from __future__ import annotations

import time
from collections.abc import Callable

from finetune.units import format_seconds

#: Seconds between two reports, and until the first.
_EVERY_S = 0.5


class RowCount:
    """Called with rows done and all rows (None: not known); says count, rate and time left, twice a second."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._began_s = self._said_s = time.monotonic()

    def __call__(self, done: int, total: int | None) -> None:
        """Report, unless the last one is less than half a second ago."""
        now_s = time.monotonic()
        if now_s - self._said_s < _EVERY_S:
            return
        self._said_s = now_s
        rate = done / (now_s - self._began_s)
        words = f"tokenising rows: {done:,}{f' of {total:,}' if total else ''}, {rate:,.0f} per second"
        if total and done and total > done:
            words += f", {format_seconds((total - done) / rate)} left"
        self._say(words)
