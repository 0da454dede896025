"""The interface of a training method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from finetune.settings import Settings

#: Rows of the dataset -> a batch.
Collator = Callable[[list[dict[str, Any]]], dict[str, Any]]


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

    def collator(self, answers: Collator) -> Collator | None:
        """Makes a batch of rows, with the collator of rows that have one answer; None for that one itself."""
        return None

    @abstractmethod
    def loss(
        self, model: Any, inputs: dict[str, Any], *, items: torch.Tensor | int | None = None, routed: bool | None = None
    ) -> MicroBatchLoss:
        """Forward passes and loss. `model` is a PeftModel with the fused head (`add_loss`), perhaps inside DDP.

        `items`: trained tokens of the whole step; None: those of the micro-batch. `routed`: ask for a mixture's auxiliary loss;
        None: as the model is configured.
        """

    def metrics(self, counts: dict[str, Any]) -> dict[str, float]:
        """Metrics of this method only, from the sums of its counts."""
        return {}


def forward(model: Any, inputs: dict[str, Any], *, routed: bool | None) -> Any:
    """Log-probabilities of the labels, without logits. `routed`: with a mixture's auxiliary loss; None: as it is configured."""
    is_mixture = hasattr(getattr(model, "module", model).config.get_text_config(), "output_router_logits")
    router = {"output_router_logits": routed} if is_mixture and routed is not None else {}
    return model(**inputs, **router, use_cache=False, fused_lm_head=True)
