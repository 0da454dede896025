"""Private names of accelerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from finetune.compat.patch_registry import PrivateName, wrap

_PREPARE = "accelerate.accelerator.fsdp2_prepare_model"

#: Read in accelerate 1.15.0.
PRIVATE_NAMES = (
    PrivateName(_PREPARE, "patch", "a model without weights is sharded first, then each rank sets its own rows",
                "accelerate.accelerator.Accelerator._prepare_fsdp2", "accelerator model", needs="cards"),
    PrivateName("torch.nn.Module._original_forward", "attribute",
                "a copied model's forward, without a closure over the original",
                "accelerate.accelerator.Accelerator.prepare_model"),
)  # fmt: skip


def shard_with(prepare: Callable[..., Any]) -> None:
    """Let accelerate shard models by `prepare(accelerate's function, accelerator, model)`."""
    wrap(_PREPARE, prepare)
