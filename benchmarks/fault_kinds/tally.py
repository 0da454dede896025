"""The outcome of many cases of one kind of fault, as a row of the table."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Cases of one kind by their outcome. `failures` has a line for each case that ended otherwise than it must."""

    kind: str
    target: int
    until: float
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """How many there were."""
        return self.outcomes.total()

    @property
    def goes_on(self) -> bool:
        """Whether more cases are wanted and there is time for them."""
        return self.cases < self.target and time.monotonic() < self.until

    def fail(self, case: str) -> None:
        """Count a case that ended otherwise than it must."""
        self.outcomes["FAILED"] += 1
        self.failures.append(f"{self.kind}: {case}")

    @property
    def missing(self) -> list[str]:
        """A line when no case was tried: nothing is shown then."""
        return [] if self.cases else [f"{self.kind}: no case was tried in the time"]

    def row(self) -> str:
        """One line of the table."""
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return f"| {self.kind} | {self.cases} of {self.target} | {outcomes} |"
