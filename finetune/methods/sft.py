"""Supervised fine-tuning: learn the answers."""

from __future__ import annotations

from typing import Any

import torch

from finetune.methods.method import MicroBatchLoss, TrainingMethod, forward


class Sft(TrainingMethod):
    """Mean negative log-likelihood of the trained tokens, as TRL's SFTTrainer."""

    evaluates_as_sft = True

    def loss(
        self, model: Any, inputs: dict[str, Any], *, items: torch.Tensor | int | None = None, routed: bool = False
    ) -> MicroBatchLoss:
        """`correct`: trained tokens that are the likeliest."""
        outputs = forward(model, inputs, routed=routed)
        tokens = outputs.label_mask.sum() if items is None else items
        loss = (-outputs.log_probs).sum() / torch.as_tensor(tokens).clamp(min=1)
        return MicroBatchLoss(loss, outputs.aux_loss, {"correct": outputs.is_top1.sum()})
