"""All checks at once, each in a thread of its own, so that one that hangs costs its own line and not the report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from finetune.doctor.compiler import check_compiler
from finetune.doctor.driver import check_cards, check_driver
from finetune.doctor.finding import Finding
from finetune.doctor.hub import check_hub, check_login
from finetune.doctor.machine import check_disk, check_memory, check_port, check_spill
from finetune.doctor.packages import check_packages
from finetune.doctor.readiness import check_data, check_model
from finetune.doctor.stack import check_stack
from finetune.recipe import Recipe

#: The whole report, in seconds.
DEADLINE_S = 9.5
Check = Callable[[], Finding | Iterable[Finding]]


def examine(recipe: Recipe | None = None, deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Every finding, in a fixed order, after at most `deadline_s` seconds. With a recipe: is what it needs on this machine?"""
    checks: dict[str, Check] = {
        "packages": check_packages, "driver": check_driver, "card memory": check_cards,
        "stack": lambda: check_stack(deadline_s - 0.7),
        "compiler": check_compiler, "host memory": check_memory, "disk": check_disk, "hub": check_hub, "hub login": check_login,
        "spill": check_spill, "port": check_port,
    }  # fmt: skip
    if recipe is not None:
        checks |= {"model": lambda: check_model(recipe), "data": lambda: check_data(recipe)}
    return run_checks(checks, deadline_s)


def run_checks(checks: dict[str, Check], deadline_s: float) -> list[Finding]:
    """Run `checks` side by side; one that has not answered by then, or broke, is a finding, too."""
    found: dict[str, list[Finding]] = {}
    threads = [threading.Thread(target=_run, args=(name, check, found), daemon=True) for name, check in checks.items()]
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = f"no answer within {deadline_s:g} s"
    return [
        finding
        for name in checks
        for finding in found.get(name) or [Finding(name, "warn", late, "Run it again when the machine is less busy.")]
    ]


def _run(name: str, check: Check, found: dict[str, list[Finding]]) -> None:
    try:
        result = check()
        found[name] = [result] if isinstance(result, Finding) else list(result)
    except Exception as error:  # noqa: BLE001 - a check that breaks is reported; the other checks go on
        what = f"could not be checked: {type(error).__name__}: {error}"
        found[name] = [Finding(name, "warn", what, "Put this line into a bug report.")]
