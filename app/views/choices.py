"""Chosen settings with their reasons, as HTML."""

from __future__ import annotations

from finetune.planner.plan import AS_SET, Plan

from .markup import Safe, render


def chosen(plan: Plan) -> Safe:
    """Return six settings with their reasons, then all settings."""
    return render(
        "choices", plan=plan, settings=plan.settings, as_set=AS_SET,
    )  # fmt: skip
