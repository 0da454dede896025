"""FSDP2 with adapters: every decoder layer stays a unit of its own."""

from __future__ import annotations

from typing import Any


def keep_layers_apart() -> None:
    """Make transformers' Trainer leave the wrap policy alone when it prepares a model with adapters for FSDP.

    It puts PEFT's in its place, which joins two policies; accelerate's preparation for FSDP2 knows single ones only and then
    wraps no layer at all: the whole model would be put together on every card for the whole step
    (accelerate/utils/fsdp_utils.py, fsdp2_prepare_auto_wrap_policy).
    """
    from transformers import trainer

    if getattr(trainer.update_fsdp_plugin_peft, "keeps_layers_apart", False):
        return
    update = trainer.update_fsdp_plugin_peft

    def updated(model: Any, accelerator: Any) -> None:
        plugin = accelerator.state.fsdp_plugin
        policy = plugin.auto_wrap_policy
        update(model, accelerator)
        plugin.auto_wrap_policy = policy

    updated.keeps_layers_apart = True  # type: ignore[attr-defined]
    trainer.update_fsdp_plugin_peft = updated
