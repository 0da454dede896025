"""Direct preference optimisation (Rafailov et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from finetune.methods import USUAL_BETA, Collator, Items, MicroBatchLoss, TrainingMethod, forward
from finetune.settings.methods import NOT_TRAINED


@dataclass(frozen=True)
class PairCollator:
    """Batches of all chosen answers, then all rejected answers."""

    answers: Collator  # of single answers

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return 2 x rows sequences."""
        columns = ("input_ids", "labels")
        return self.answers([{name: row[prefix + name] for name in columns} for prefix in ("", "rejected_") for row in rows])


class Dpo(TrainingMethod):
    """Losses on pairs, as in TRL's DPOTrainer."""

    def collator(self, answers: Collator) -> Collator:
        return PairCollator(answers)

    def loss(self, model: Any, inputs: dict[str, Any], *, items: Items = None, routed: bool | None = None) -> MicroBatchLoss:
        # The reference is the model before training: no second model. Its forward pass comes first, when no activations of
        # the training pass are in memory.
        reference = self.reference_log_probs(model, inputs)
        outputs = forward(model, inputs, routed=routed)
        log_probs = outputs.log_probs.sum(dim=1)
        log_ratios = log_probs - reference
        lengths = (inputs["labels"] != NOT_TRAINED).sum(dim=1).clamp(min=1)
        beta = self.settings.beta or USUAL_BETA
        loss_of_pairs = PREFERENCE_LOSSES[self.settings.loss_type or "sigmoid"]
        losses = loss_of_pairs(beta, *log_ratios.chunk(2), *lengths.chunk(2), self.settings.label_smoothing)
        if self.settings.sft_weight:
            losses = losses - self.settings.sft_weight * (log_probs / lengths).chunk(2)[0]
        chosen, rejected = (beta * log_ratios.detach()).chunk(2)
        counts = {
            "correct": outputs.is_top1.sum(), "chosen": torch.ones_like(chosen).sum(), "rewards/chosen": chosen.sum(),
            "rewards/rejected": rejected.sum(), "rewards/accuracies": (chosen > rejected).sum(),
            "chosen_tokens": lengths.chunk(2)[0].sum(),
        }  # fmt: skip
        return MicroBatchLoss(losses.mean(), outputs.aux_loss, counts)

    def metrics(self, counts: dict[str, Any]) -> dict[str, float]:
        pairs = counts.get("chosen")
        if not pairs:
            return {}
        means = {name: count / pairs for name, count in counts.items() if name.startswith("rewards/") and count is not None}
        return {**means, "rewards/margins": means["rewards/chosen"] - means["rewards/rejected"]}


def _robust(beta: float, chosen: Any, rejected: Any, _: Any, __: Any, swapped: float) -> torch.Tensor:
    # unbiased where a share `swapped` of the pairs is in the wrong order (Chowdhury et al., 2024)
    in_order, in_wrong_order = (-logsigmoid(sign * beta * (chosen - rejected)) for sign in (1, -1))
    return ((1 - swapped) * in_order - swapped * in_wrong_order) / (1 - 2 * swapped)


def _ipo(beta: float, chosen: Any, rejected: Any, chosen_tokens: Any, rejected_tokens: Any, *_: Any) -> torch.Tensor:
    # equation 17 of IPO, with means over the tokens of an answer
    return (chosen / chosen_tokens - rejected / rejected_tokens - 1 / (2 * beta)) ** 2


#: `loss_type` -> losses of pairs, from beta, log-ratios and tokens of the chosen and rejected answers, and label_smoothing.
PREFERENCE_LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "sigmoid": lambda beta, chosen, rejected, *_: -logsigmoid(beta * (chosen - rejected)),
    "robust": _robust,
    "ipo": _ipo,
    "hinge": lambda beta, chosen, rejected, *_: (1 - beta * (chosen - rejected)).relu(),
    "apo_zero": lambda beta, chosen, rejected, *_: 1 - (beta * chosen).sigmoid() + (beta * rejected).sigmoid(),
    "apo_down": lambda beta, chosen, rejected, *_: (beta * chosen).sigmoid() + 1 - (beta * (chosen - rejected)).sigmoid(),
    "sppo_hard": lambda beta, chosen, rejected, *_: (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2,
}
