"""Training methods: batches, losses and metrics."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finetune.settings import Settings


def method_of(settings: Settings) -> TrainingMethod:
    """Return the training method of a recipe."""
    # finetune/settings/methods.py has the facts that data, forecast and planner need of each method
    return pkgutil.resolve_name(settings.training_method.implementation)(settings)


#: Rows of the dataset -> a batch.
Collator = Callable[[list[dict[str, Any]]], dict[str, Any]]
#: Trained tokens of the whole step.
Items = Tensor | int | None
USUAL_BETA = 0.1  # beta in DPO's paper, TRL, LLaMA-Factory and Axolotl
#: Nats by which collapsed answers are less likely than under the reference: per answer and per token, on average.
COLLAPSED_ANSWER_NATS, COLLAPSED_TOKEN_NATS = 10.0, 1.0


@dataclass(frozen=True)
class MicroBatchLoss:
    """The loss of a micro-batch."""

    loss: Tensor
    auxiliary: Tensor | None  # a mixture's auxiliary loss
    #: Sums over rows or tokens, on the device, which are added over an optimizer step and all ranks.
    counts: dict[str, Tensor]


class TrainingMethod(ABC):
    """A training method with the settings of a recipe, used by the trainer and by the dry run."""

    #: Whether the loss is SFT's: divided by the trained tokens of the whole step, and in evaluations TRL's with its metrics.
    #: Else the loss is a mean over a micro-batch.
    is_sft = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        #: Copies of the adapter that training continues from, in the order of the trainable parameters.
        self.reference_copies: list[Tensor] = []

    def copy_reference(self, model: Any) -> None:
        """Copy the adapter that training continues from, if the method needs a reference."""
        if self.settings.training_method.reference_passes and self.settings.adapter_name_or_path is not None:
            self.reference_copies = [parameter.detach().clone() for parameter in _trainable(model)]

    @contextmanager
    def as_reference(self, model: Any) -> Iterator[None]:
        """Temporarily restore the model from before training, for passes without gradients."""
        if self.reference_copies:
            parameters = _trainable(model)
            trained = [parameter.data for parameter in parameters]
            for parameter, reference in zip(parameters, self.reference_copies, strict=True):
                parameter.data = reference
            try:
                yield
            finally:
                for parameter, data in zip(parameters, trained, strict=True):
                    parameter.data = data
        else:  # a new adapter: the base model is the reference
            with getattr(model, "module", model).disable_adapter():
                yield

    def collator(self, answers: Collator) -> Collator | None:
        """Return a collator based on the collator of single answers; None for that collator itself."""
        return None

    def dry_run_inputs(self, rows: int, mismatched_tokens: int) -> dict[str, Tensor]:
        """Return this method's extra inputs for the dry run. `mismatched_tokens`: width of KTO's KL batch."""
        return {}

    @abstractmethod
    def loss(self, model: Any, inputs: dict[str, Any], *, items: Items = None, routed: bool | None = None) -> MicroBatchLoss:
        """Return the loss of a PeftModel with the fused head (`add_loss`), perhaps inside DDP.

        `items`: trained tokens of the whole step; None: of the micro-batch. `routed`: compute a mixture's auxiliary loss;
        None: as configured.
        """

    def reference_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Return each sequence's log-probability under the reference."""
        with torch.no_grad(), self.as_reference(model):
            return sequence_log_probs(model, inputs)

    def metrics(self, counts: dict[str, Any]) -> dict[str, float]:
        """Return this method's metrics, by TRL's names: means from the sums in `counts`."""
        return {}

    def collapse(self, counts: dict[str, Any]) -> str | None:
        """Return a sentence if the chosen answers have become much less likely, or None."""
        answers, tokens = counts.get("chosen"), counts.get("chosen_tokens")
        # `apo_down` makes the chosen answers less likely on purpose
        if not answers or not tokens or self.settings.loss_type == "apo_down":
            return None
        lost_nats = -counts["rewards/chosen"] / (self.settings.beta or USUAL_BETA)
        if lost_nats < max(COLLAPSED_ANSWER_NATS * answers, COLLAPSED_TOKEN_NATS * tokens):
            return None
        per_token = f"{lost_nats / tokens:.1f} per token"
        return f"the chosen answers are {lost_nats / answers:.0f} nats less likely than before training, {per_token}"


def _trainable(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def forward(model: Any, inputs: dict[str, Any], *, routed: bool | None) -> Any:
    """Return the labels' log-probabilities, without logits, and if `routed` a mixture's auxiliary loss."""
    is_mixture = hasattr(getattr(model, "module", model).config.get_text_config(), "output_router_logits")
    router = {"output_router_logits": routed} if is_mixture and routed is not None else {}
    return model(**inputs, **router, use_cache=False, fused_lm_head=True)


def sequence_log_probs(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the log-probability of each sequence's labels."""
    return forward(model, inputs, routed=False).log_probs.sum(dim=1)


class Sft(TrainingMethod):
    """Mean negative log-likelihood of the trained tokens, as in TRL's SFTTrainer."""

    is_sft = True

    def loss(self, model: Any, inputs: dict[str, Any], *, items: Items = None, routed: bool | None = None) -> MicroBatchLoss:
        outputs = forward(model, inputs, routed=routed)
        tokens = outputs.label_mask.sum() if items is None else items
        loss = (-outputs.log_probs).sum() / torch.as_tensor(tokens).clamp(min=1)
        return MicroBatchLoss(loss, outputs.aux_loss, {"correct": outputs.is_top1.sum()})
