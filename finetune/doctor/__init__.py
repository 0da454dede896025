"""Checks of this machine for runs, with fixes for failures."""

from __future__ import annotations

from finetune.doctor.downloads import check_data, check_hub, check_login, check_model
from finetune.doctor.findings import Check, Finding, run_check, worst
from finetune.doctor.machine import (
    check_cards,
    check_compiler,
    check_disk,
    check_driver,
    check_memory,
    check_packages,
    check_spill,
    check_stack,
)
from finetune.settings import Recipe
from finetune.units import Progress

__all__ = ["Finding", "examine", "worst"]

DEADLINE_S = 9.5  # for each check


def examine(recipe: Recipe | None, progress: Progress) -> list[Finding]:
    """Return all findings, also on the recipe's model and data."""
    checks: dict[str, Check] = {
        "packages": check_packages, "driver": check_driver, "card memory": check_cards, "stack": lambda: check_stack(progress),
        "compiler": check_compiler, "host memory": check_memory, "disk": check_disk, "hub": check_hub, "hub login": check_login,
        "spill": check_spill,
    }  # fmt: skip
    if recipe is not None:
        checks |= {"model": lambda: check_model(recipe), "data": lambda: check_data(recipe)}
    findings = []
    for name, check in checks.items():  # the process of `stack` has its own deadline
        findings += run_check(name, check, None if name == "stack" else DEADLINE_S)
    return findings
