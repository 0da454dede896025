"""Finding: the result of one check, as a value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: From best to worst. `skip` could not be tried or is not needed here; `warn` works with a limit; `fail` does not work.
STATES = ("ok", "skip", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """`what` was seen by `check`, and what to type or do (`fix`, empty when nothing needs doing).

    `facts` are the numbers behind it, units in their names. Neither holds a secret or the user's name.
    """

    check: str
    state: str
    what: str
    fix: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The finding as plain values, the home directory written as `~`."""
        return _without_home(asdict(self))


def worst(findings: Iterable[Finding]) -> str:
    """The worst state among `findings`; `ok` when there are none."""
    return max((finding.state for finding in findings), key=STATES.index, default="ok")


def _without_home(value: Any) -> Any:
    """A home directory has its owner's name in it, and a report is pasted where anybody reads it."""
    home = str(Path.home())
    if isinstance(value, str):
        return value.replace(home, "~") if len(home) > 1 else value
    if isinstance(value, dict):
        return {key: _without_home(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_home(part) for part in value]
    return value
