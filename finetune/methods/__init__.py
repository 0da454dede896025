"""A training method: its batches, the loss that the worker and the dry run call, and its metrics.

finetune/settings/methods.py has the table, with what data, forecast and planner must know of each.
"""

from __future__ import annotations

import pkgutil

from finetune.methods.method import TrainingMethod
from finetune.settings import Settings
from finetune.settings.methods import METHODS


def method_of(settings: Settings) -> TrainingMethod:
    """The method of a recipe, with its settings."""
    return pkgutil.resolve_name(METHODS[settings.method].implementation)(settings)
