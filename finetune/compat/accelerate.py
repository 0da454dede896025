"""Patches for FSDP2, as of accelerate 1.15.0 and transformers 5.23.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from finetune.compat import wrap


def shard_with(prepare: Callable[..., Any]) -> None:
    """Let accelerate shard models by `prepare(accelerate's function, accelerator, model)`."""
    # a model is sharded while its weights are on meta, then each rank sets its own rows
    wrap("accelerate.accelerator.fsdp2_prepare_model", prepare)


def keep_fsdp_wrap_policy() -> None:
    """Keep the FSDP wrap policy of Trainer for models with adapters."""

    # PEFT's policy combines two policies, which accelerate's FSDP2 does not recognise: it would wrap no layer, and every GPU
    # would gather the whole model for the whole step (accelerate/utils/fsdp_utils.py, fsdp2_prepare_auto_wrap_policy)
    def update_and_restore(update: Callable[..., None], model: Any, accelerator: Any) -> None:
        plugin = accelerator.state.fsdp_plugin
        policy = plugin.auto_wrap_policy
        update(model, accelerator)
        plugin.auto_wrap_policy = policy

    wrap("transformers.trainer.update_fsdp_plugin_peft", update_and_restore)
