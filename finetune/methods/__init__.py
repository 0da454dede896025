"""What a training method computes: its batches, the loss that the worker and the dry run call, and its metrics.

finetune/settings/methods.py has what data, forecast and planner must know of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.methods.dpo import Dpo
from finetune.methods.kto import Kto
from finetune.methods.method import TrainingMethod
from finetune.methods.sft import Sft

if TYPE_CHECKING:
    from finetune.settings import Settings

_METHODS: dict[str, type[TrainingMethod]] = {"sft": Sft, "pretrain": Sft, "dpo": Dpo, "kto": Kto}


def method_of(settings: Settings) -> TrainingMethod:
    """The method of a recipe, with its settings."""
    return _METHODS[settings.method](settings)
