"""Checks of this machine for runs, with fixes for failures."""

from __future__ import annotations

from finetune.doctor.downloads import check_data, check_hub, check_login, check_model
from finetune.doctor.findings import Check, Finding, run_checks, worst
from finetune.doctor.machine import check_cards, check_disk, check_driver, check_memory, check_spill
from finetune.doctor.packages import check_compiler, check_packages, check_stack
from finetune.printable import Progress
from finetune.settings import Recipe

__all__ = ["Finding", "examine", "worst"]

#: Seconds for each check, and for the process that imports torch and bitsandbytes, which takes long on a busy machine or from a
#: slow disk. The process gets the margin less, so that its findings arrive before the check's deadline.
DEADLINE_S, STACK_DEADLINE_S, PROBE_MARGIN_S = 9.5, 180.0, 0.7


def examine(recipe: Recipe | None, progress: Progress) -> list[Finding]:
    """Return all findings, also on the recipe's model and data."""
    # findings keep this order, although the checks run in parallel
    checks: dict[str, Check] = {
        "packages": check_packages, "driver": check_driver, "card memory": check_cards,
        "stack": lambda: check_stack(STACK_DEADLINE_S - PROBE_MARGIN_S, progress),
        "compiler": check_compiler, "host memory": check_memory, "disk": check_disk, "hub": check_hub, "hub login": check_login,
        "spill": check_spill,
    }  # fmt: skip
    if recipe is not None:
        checks |= {"model": lambda: check_model(recipe), "data": lambda: check_data(recipe)}
    return run_checks(checks, DEADLINE_S, {"stack": STACK_DEADLINE_S})
