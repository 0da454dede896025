"""Preference methods: DPO (Rafailov et al., 2023) on pairs, KTO (Ethayarajh et al., 2024) on answers labelled good or bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from finetune.methods import USUAL_BETA, Collator, Items, MicroBatchLoss, TrainingMethod, forward, sequence_log_probs
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


def _robust(beta: float, chosen: Any, rejected: Any, _: Any, __: Any, swapped: float) -> Tensor:
    # unbiased where a share `swapped` of the pairs is in the wrong order (Chowdhury et al., 2024)
    in_order, in_wrong_order = (-logsigmoid(sign * beta * (chosen - rejected)) for sign in (1, -1))
    return ((1 - swapped) * in_order - swapped * in_wrong_order) / (1 - 2 * swapped)


def _ipo(beta: float, chosen: Any, rejected: Any, chosen_tokens: Any, rejected_tokens: Any, *_: Any) -> Tensor:
    # equation 17 of IPO, with means over the tokens of an answer
    return (chosen / chosen_tokens - rejected / rejected_tokens - 1 / (2 * beta)) ** 2


#: `loss_type` -> losses of pairs, from beta, log-ratios and tokens of the chosen and rejected answers, and label_smoothing.
PREFERENCE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": lambda beta, chosen, rejected, *_: -logsigmoid(beta * (chosen - rejected)),
    "robust": _robust,
    "ipo": _ipo,
    "hinge": lambda beta, chosen, rejected, *_: (1 - beta * (chosen - rejected)).relu(),
    "apo_zero": lambda beta, chosen, rejected, *_: 1 - (beta * chosen).sigmoid() + (beta * rejected).sigmoid(),
    "apo_down": lambda beta, chosen, rejected, *_: (beta * chosen).sigmoid() + 1 - (beta * (chosen - rejected)).sigmoid(),
    "sppo_hard": lambda beta, chosen, rejected, *_: (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2,
}


_KL_PREFIX = "kl_"


@dataclass(frozen=True)
class LabelledCollator:
    """Batches of labelled answers and, with `has_kl`, their KL batch."""

    answers: Collator  # of single answers
    max_length: int
    has_kl: bool

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the answers' batch, `desirable` for each example, and the KL batch with the prefix `kl_`."""
        batch = self.answers([{name: row[name] for name in ("input_ids", "labels")} for row in rows])
        batch["desirable"] = torch.tensor([bool(row["desirable"]) for row in rows])
        if not self.has_kl:
            return batch
        # each prompt with the answer of the row before, as in TRL
        mismatched = [self._mismatched(row, rows[index - 1]) for index, row in enumerate(rows)]
        return batch | {f"{_KL_PREFIX}{name}": value for name, value in self.answers(mismatched).items()}

    def _mismatched(self, row: dict[str, Any], other: dict[str, Any]) -> dict[str, list[int]]:
        prompt = row["input_ids"][: _answer_start(row)]
        start = _answer_start(other)
        input_ids = [*prompt, *other["input_ids"][start:]]
        labels = [NOT_TRAINED] * len(prompt) + list(other["labels"][start:])
        return {"input_ids": input_ids[: self.max_length], "labels": labels[: self.max_length]}


def _answer_start(row: dict[str, Any]) -> int:
    # the first trained token, or the end of an example without an answer
    return next((index for index, label in enumerate(row["labels"]) if label != NOT_TRAINED), len(row["labels"]))


class Kto(TrainingMethod):
    """KTO's loss as in TRL's KTOTrainer, and its `apo_zero_unpaired`."""

    def collator(self, answers: Collator) -> Collator:
        return LabelledCollator(answers, self.settings.max_length, self.settings.has_kl)

    def dry_run_inputs(self, rows: int, mismatched_tokens: int) -> dict[str, Tensor]:
        batch = {"desirable": torch.zeros(rows, dtype=torch.bool)}
        names = ("input_ids", "labels", "attention_mask") if self.settings.has_kl else ()
        return batch | {f"{_KL_PREFIX}{name}": torch.ones((rows, mismatched_tokens), dtype=torch.long) for name in names}

    def loss(self, model: Any, inputs: dict[str, Any], *, items: Items = None, routed: bool | None = None) -> MicroBatchLoss:
        desirable = inputs["desirable"]
        kl_batch = {name.removeprefix(_KL_PREFIX): value for name, value in inputs.items() if name.startswith(_KL_PREFIX)}
        batch = {name: value for name, value in inputs.items() if name != "desirable" and not name.startswith(_KL_PREFIX)}
        # the passes without gradients come first, when no activations are in memory
        reference = self.reference_log_probs(model, batch)
        kl = reference.new_zeros(())
        if kl_batch:
            # KTO's reference point is not trained: the mean log-ratio of the KL batch to the reference, at least 0
            kl_reference = self.reference_log_probs(model, kl_batch)
            if len(desirable) > 1:  # a single row, which only the end of an epoch may have, has no other answer
                with torch.no_grad():
                    kl = (sequence_log_probs(model, kl_batch) - kl_reference).mean()
            kl = _mean_over_ranks(kl).clamp(min=0)
        outputs = forward(model, batch, routed=routed)
        log_ratios = outputs.log_probs.sum(dim=1) - reference
        beta = self.settings.beta or USUAL_BETA
        sign = torch.where(desirable, 1.0, -1.0)
        good_weight, bad_weight = self.settings.desirable_weight or 1.0, self.settings.undesirable_weight or 1.0
        margins = sign * (log_ratios - kl)
        losses = torch.where(desirable, good_weight, bad_weight) * (1 - (beta * margins).sigmoid())
        rewards = beta * log_ratios.detach()
        counts = {
            "correct": outputs.is_top1.sum(), "rows": torch.ones_like(rewards).sum(), "chosen": desirable.sum(),
            # rows on the side of `kl` that their label demands
            "rewards/accuracies": (margins.detach() > 0).sum(), "rewards/chosen": (rewards * desirable).sum(),
            "rewards/rejected": (rewards * ~desirable).sum(), "kl": kl * len(rewards),
            "chosen_tokens": ((batch["labels"] != NOT_TRAINED).sum(dim=1) * desirable).sum(),
        }  # fmt: skip
        return MicroBatchLoss(losses.mean(), outputs.aux_loss, counts)

    def metrics(self, counts: dict[str, Any]) -> dict[str, float]:
        rows, chosen = counts.get("rows"), counts.get("chosen")
        if not rows or chosen is None:
            return {}
        divisors = {"rewards/accuracies": rows, "rewards/chosen": chosen, "rewards/rejected": rows - chosen}
        if self.settings.has_kl:
            divisors["kl"] = rows
        means = {name: counts[name] / divisor for name, divisor in divisors.items() if divisor}
        # no margin without answers of both labels
        if chosen and rows > chosen:
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means


def _mean_over_ranks(value: Tensor) -> Tensor:
    if not dist.is_initialized():
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
