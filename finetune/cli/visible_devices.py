"""What a command's process may see of the machine's cards."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from finetune.planner.plan import read_plan
from finetune.run.card import cards_of, visibility

if TYPE_CHECKING:
    from finetune.run.directory import RunDirectory


def restrict_visible_devices(run: RunDirectory) -> None:
    """Let this process see only the card that the run was planned for; before imports, as bitsandbytes asks CUDA in its own."""
    os.environ.update(visibility(cards_of(read_plan(run.plan))[:1]))
