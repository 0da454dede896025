"""The interface of a training method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from finetune.settings import Settings
from finetune.settings.methods import METHODS

#: Rows of the dataset -> a batch.
Collator = Callable[[list[dict[str, Any]]], dict[str, Any]]


#: Chosen answers have collapsed where they are this much less likely than for the reference, in nats: an answer on average, and
#: a token of it.
COLLAPSED_ANSWER_NATS, COLLAPSED_TOKEN_NATS = 10.0, 1.0


@dataclass(frozen=True)
class MicroBatchLoss:
    """The loss of a micro-batch, and a mixture's auxiliary loss (None without one). `counts` are sums over its rows or tokens,
    as tensors on the device, which are added over an optimizer step and all ranks."""

    loss: torch.Tensor
    auxiliary: torch.Tensor | None
    counts: dict[str, torch.Tensor]


class TrainingMethod(ABC):
    """A training method with the settings of a recipe. The same object is used by the trainer and by the dry run."""

    #: Whether the loss is divided by the trained tokens of the whole step; else it is a mean over a micro-batch.
    counts_items = True
    #: Whether held-out rows are evaluated with TRL's loss and metrics of SFT.
    evaluates_as_sft = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        #: Copies of the adapter that training goes on from, in the order of the trainable parameters.
        self.reference_copies: list[torch.Tensor] = []

    def keep_reference(self, model: Any) -> None:
        """Before the first step: copy the adapter that training goes on from, which each step is compared with, if any."""
        continues = self.settings.adapter_name_or_path is not None and self.settings.precompute_ref_log_probs is not True
        if METHODS[self.settings.method].reference_passes and continues:
            self.reference_copies = [parameter.detach().clone() for parameter in _trainable(model)]

    @contextmanager
    def as_reference(self, model: Any) -> Iterator[None]:
        """The model as it was before the training: without its adapter, or with the weights that training went on from. For
        passes without gradients; where the reference is precomputed, only before the first step."""
        if not self.reference_copies and self.settings.adapter_name_or_path is not None:
            yield
            return
        if not self.reference_copies:
            with getattr(model, "module", model).disable_adapter():
                yield
            return
        parameters = _trainable(model)
        trained = [parameter.data for parameter in parameters]
        _set_data(parameters, self.reference_copies)
        try:
            yield
        finally:
            _set_data(parameters, trained)

    def collator(self, answers: Collator) -> Collator | None:
        """Makes a batch of rows, with the collator of rows that have one answer; None for that one itself."""
        return None

    def more_inputs(self, rows: int, mismatched_tokens: int) -> dict[str, torch.Tensor]:
        """Tensors that a dry run adds to a batch of `rows` sequences: of the same shapes and dtypes as the collator's."""
        return {}

    @abstractmethod
    def loss(
        self, model: Any, inputs: dict[str, Any], *, items: torch.Tensor | int | None = None, routed: bool | None = None
    ) -> MicroBatchLoss:
        """Forward passes and loss. `model` is a PeftModel with the fused head (`add_loss`), perhaps inside DDP.

        `items`: trained tokens of the whole step; None: of the micro-batch. `routed`: ask for a mixture's auxiliary loss;
        None: as the model is configured.
        """

    def reference_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Log-probabilities of each sequence for the reference, without gradients."""
        with torch.no_grad(), self.as_reference(model):
            return forward(model, inputs, routed=False).log_probs.sum(dim=1)

    def metrics(self, counts: dict[str, Any]) -> dict[str, float]:
        """Metrics of this method only, from the sums of its counts."""
        return {}

    def collapse(self, counts: dict[str, Any]) -> str | None:
        """In words, how unlikely the chosen answers have become, where they have collapsed; None where they have not."""
        return None


def collapse_of(log_ratios: float, answers: float, tokens: float) -> str | None:
    """`TrainingMethod.collapse` of chosen answers, from the sum of their log-ratios to the reference, their number and their
    tokens."""
    if not answers or log_ratios > -max(COLLAPSED_ANSWER_NATS * answers, COLLAPSED_TOKEN_NATS * tokens):
        return None
    return (
        f"the chosen answers are {-log_ratios / answers:.0f} nats less likely than before the training, "
        f"{-log_ratios / tokens:.1f} for each token"
    )


def _trainable(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _set_data(parameters: list[Any], values: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value


def forward(model: Any, inputs: dict[str, Any], *, routed: bool | None) -> Any:
    """Log-probabilities of the labels, without logits. `routed`: with a mixture's auxiliary loss; None: as configured."""
    is_mixture = hasattr(getattr(model, "module", model).config.get_text_config(), "output_router_logits")
    router = {"output_router_logits": routed} if is_mixture and routed is not None else {}
    return model(**inputs, **router, use_cache=False, fused_lm_head=True)


class Sft(TrainingMethod):
    """Mean negative log-likelihood of the trained tokens, as TRL's SFTTrainer."""

    evaluates_as_sft = True

    def loss(
        self, model: Any, inputs: dict[str, Any], *, items: torch.Tensor | int | None = None, routed: bool | None = None
    ) -> MicroBatchLoss:
        """`correct`: trained tokens that are the likeliest."""
        outputs = forward(model, inputs, routed=routed)
        tokens = outputs.label_mask.sum() if items is None else items
        loss = (-outputs.log_probs).sum() / torch.as_tensor(tokens).clamp(min=1)
        return MicroBatchLoss(loss, outputs.aux_loss, {"correct": outputs.is_top1.sum()})
