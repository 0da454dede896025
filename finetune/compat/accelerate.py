"""Patches of accelerate, as of 1.15.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from finetune.compat.patch_registry import wrap


def shard_with(prepare: Callable[..., Any]) -> None:
    """Let accelerate shard models by `prepare(accelerate's function, accelerator, model)`."""
    # a model is sharded while its weights are on meta, then each rank sets its own rows
    wrap("accelerate.accelerator.fsdp2_prepare_model", prepare)
