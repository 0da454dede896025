"""Training methods: batches, losses and metrics."""

from __future__ import annotations

import pkgutil

from finetune.methods.method import TrainingMethod
from finetune.settings import Settings
from finetune.settings.methods import METHODS


def method_of(settings: Settings) -> TrainingMethod:
    """Return the training method of a recipe."""
    # finetune/settings/methods.py has the facts that data, forecast and planner need of each method
    return pkgutil.resolve_name(METHODS[settings.method].implementation)(settings)
