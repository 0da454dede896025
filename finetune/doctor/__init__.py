"""Checks of this machine for runs, with fixes for failures."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.settings import Recipe
from finetune.units import Progress

#: From best to worst. `skip`: could not be tried or is not needed here; `warn`: works with a limit; `fail`: does not work.
STATES = ("ok", "skip", "warn", "fail")
DEADLINE_S = 9.5  # for each check
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

    def run() -> None:
        try:
            result = check()
            findings.extend([result] if isinstance(result, Finding) else list(result))
        except Exception as error:  # noqa: BLE001 - a check that raises is reported; the other checks continue
            what = f"could not be checked: {type(error).__name__}: {error}"
            findings.append(Finding(name, "warn", what, "Put this line into a bug report."))

    thread = threading.Thread(target=run, daemon=True)  # a call of the driver may hang
    thread.start()
    thread.join(deadline_s)
    return findings or [Finding(name, "warn", f"no answer within {deadline_s} s", BUSY_FIX)]


def examine(recipe: Recipe | None, progress: Progress) -> list[Finding]:
    """Return all findings, also on the recipe's model and data."""
    from finetune.doctor import downloads, machine  # here: they import this module

    checks: dict[str, Check] = {
        "packages": machine.check_packages, "driver": machine.check_driver, "card memory": machine.check_cards,
        "stack": lambda: machine.check_stack(progress), "compiler": machine.check_compiler, "host memory": machine.check_memory,
        "disk": machine.check_disk, "hub": downloads.check_hub, "hub login": downloads.check_login,
        "spill": machine.check_spill,
    }  # fmt: skip
    if recipe is not None:
        checks |= {"model": lambda: downloads.check_model(recipe), "data": lambda: downloads.check_data(recipe)}
    findings = []
    for name, check in checks.items():  # the process of `stack` has its own deadline
        findings += run_check(name, check, None if name == "stack" else DEADLINE_S)
    return findings
