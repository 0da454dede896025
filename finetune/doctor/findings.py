"""Findings of checks, and a parallel runner with a deadline."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
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
    """The result of a check."""

    check: str
    state: str
    what: str
    fix: str = ""  # empty when nothing needs fixing
    #: Numbers with units in their names. Neither they nor `what` has a secret or the user's name.
    facts: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        home = json.dumps(str(Path.home()))[1:-1]  # the home folder has the user's name
        text = json.dumps(asdict(self))
        return json.loads(text.replace(home, "~") if len(home) > 1 else text)


Check = Callable[[], Finding | Iterable[Finding]]


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst state among `findings`, or `ok`."""
    return max((finding.state for finding in findings), key=STATES.index, default="ok")


def run_checks(checks: dict[str, Check], deadline_s: float, longer_s: Mapping[str, float] = {}) -> list[Finding]:
    """Run each check in a thread; an exception or a missed deadline is a finding, too."""
    results: dict[str, list[Finding]] = {}
    threads = {name: threading.Thread(target=_run, args=(name, checks[name], results), daemon=True) for name in checks}
    deadlines_s, began_s = {name: longer_s.get(name, deadline_s) for name in checks}, time.monotonic()
    for thread in threads.values():
        thread.start()
    # the shortest deadlines first, so that no check gets longer than its own
    for name in sorted(checks, key=deadlines_s.__getitem__):
        threads[name].join(max(0.0, began_s + deadlines_s[name] - time.monotonic()))
    findings = []
    for name in checks:
        missed = Finding(name, "warn", f"no answer within {deadlines_s[name]:g} s", BUSY_FIX)
        findings += results.get(name) or [missed]
    return findings


def _run(name: str, check: Check, results: dict[str, list[Finding]]) -> None:
    try:
        result = check()
        results[name] = [result] if isinstance(result, Finding) else list(result)
    except Exception as error:  # noqa: BLE001 - a check that raises is reported; the other checks continue
        what = f"could not be checked: {type(error).__name__}: {error}"
        results[name] = [Finding(name, "warn", what, "Put this line into a bug report.")]
