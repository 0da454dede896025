"""SFTTrainer's loss on a model that has no trainer."""

from __future__ import annotations

from typing import Any


# for the dry run, and for checks of a model before training
def add_loss(model: Any) -> None:
    """Patch a transformers model or PeftModel with SFTTrainer's fused head and auxiliary router loss."""
    from finetune.compat.trl import fused_lm_head, import_without_listing_packages

    import_without_listing_packages()
    config = model.config.get_text_config()
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = getattr(config, "router_aux_loss_coef", 0.0) != 0.0
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    fused_lm_head()(base, outputs=("log_probs", "entropy", "is_top1"))
