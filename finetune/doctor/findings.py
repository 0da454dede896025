"""Findings of checks, and their runner."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: From best to worst. `skip`: could not be tried or is not needed here; `warn`: works with a limit; `fail`: does not work.
STATES = ("ok", "skip", "warn", "fail")
BUSY_FIX = "Run it again when the machine is less busy."
#: Part of the probe -> the name of its check, and a fix.
PARTS = {
    "torch": ("cuda", "pip install --force-reinstall torch"),
    "bitsandbytes": (
        "bitsandbytes",
        "pip install --force-reinstall bitsandbytes; without it: load_in_4bit=false load_in_8bit=false optim=adamw_torch",
    ),
    "triton": ("triton", "See the line `compiler`; then pip install --force-reinstall triton"),
}


@dataclass(frozen=True)
class Finding:
    """The result of a check. `what` has no secret and no user name."""

    check: str
    state: str
    what: str
    fix: str = ""  # empty when nothing needs fixing

    def as_json(self) -> dict[str, Any]:
        home = json.dumps(str(Path.home()))[1:-1]  # the home folder has the user's name
        text = json.dumps(asdict(self))
        return json.loads(text.replace(home, "~") if len(home) > 1 else text)


Check = Callable[[], Finding | Iterable[Finding]]


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst state among `findings`, or `ok`."""
    return max((finding.state for finding in findings), key=STATES.index, default="ok")


def run_check(name: str, check: Check, deadline_s: float | None) -> list[Finding]:
    """Return a check's findings; an exception or a missed deadline is a finding, too."""
    findings: list[Finding] = []
    thread = threading.Thread(target=_run, args=(name, check, findings), daemon=True)  # a call of the driver may hang
    thread.start()
    thread.join(deadline_s)
    return findings or [Finding(name, "warn", f"no answer within {deadline_s} s", BUSY_FIX)]


def _run(name: str, check: Check, findings: list[Finding]) -> None:
    try:
        result = check()
        findings += [result] if isinstance(result, Finding) else list(result)
    except Exception as error:  # noqa: BLE001 - a check that raises is reported; the other checks continue
        what = f"could not be checked: {type(error).__name__}: {error}"
        findings.append(Finding(name, "warn", what, "Put this line into a bug report."))
