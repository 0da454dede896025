"""Training methods; finetune/methods computes. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Method:
    """A training method."""

    #: Module and class.
    implementation: str = "finetune.methods:Sft"
    #: Tokenised sequences per row, all in one micro-batch.
    sequences: int = 1
    #: Forward passes without gradients per training pass.
    reference_passes: int = 0
    #: Fewest rows of a micro-batch.
    min_rows: int = 1
    #: The only format of its rows; None: any format with one answer.
    row_format: str | None = None
    #: Values of `loss_type`, the default first.
    losses: tuple[str, ...] = ()
    #: Settings that belong to this method.
    settings: tuple[str, ...] = ()
    #: Other settings that don't work with this method, and why.
    refused: tuple[tuple[str, str], ...] = ()
    #: Multiple of SFT's learning rate, and the source of that factor.
    rate_factor: float = 1.0
    rate_source: str = ""

    @property
    def has_own_format(self) -> bool:
        """Whether SFT can't read its row format."""
        return self.row_format not in (None, "text")

    @property
    def packs(self) -> bool:
        return "packing" not in dict(self.refused)


# The texts of `method` and of these settings are in settings/schema.py. Rows that fit several methods take the first one.
METHODS = {
    "sft": Method(),
    "pretrain": Method(
        row_format="text", rate_factor=0.25, rate_source="Unsloth",  # 5e-5 in its notebooks, to keep what the model knows
        refused=(
            ("train_on_inputs", "plain text has no prompt, all of it is trained"),
            ("chat_template", "plain text is trained without one"),
        ),
    ),
    "dpo": Method(
        implementation="finetune.methods.preferences:Dpo", sequences=2, reference_passes=1, row_format="preference",
        losses=("sigmoid", "robust", "ipo", "hinge", "apo_zero", "apo_down", "sppo_hard"),
        settings=("beta", "loss_type", "label_smoothing", "sft_weight"),
        rate_factor=0.025, rate_source="TRL: dpo.py, sft.py",  # 5e-6 and 2e-4 with LoRA
        refused=(
            ("packing", "pairs are not packed"),
            ("train_on_inputs", "the prompt is the same in both answers of a pair"),
        ),
    ),
    "kto": Method(
        implementation="finetune.methods.preferences:Kto", reference_passes=3, min_rows=2, row_format="labelled",
        losses=("kto", "apo_zero_unpaired"),
        settings=("beta", "loss_type", "desirable_weight", "undesirable_weight"),
        rate_factor=0.025, rate_source="DPO",
        refused=(
            ("packing", "its rows are not packed"),
            ("train_on_inputs", "only answers are good or bad"),
        ),
    ),
}  # fmt: skip
#: Defaults that depend on the method.
USUAL_VALUES: dict[str, dict[str, Any]] = {"pretrain": {"excess_length": "chunk"}}
#: Metric by its name in events -> label and format.
METRICS = {
    "rewards/accuracies": ("answers in order", "{:.1%}"), "rewards/margins": ("reward margin", "{:.3g}"),
    "rewards/chosen": ("reward of chosen", "{:.3g}"), "rewards/rejected": ("reward of rejected", "{:.3g}"),
    "kl": ("KL", "{:.3g}"),
}  # fmt: skip
#: Metrics for one line.
MAIN_METRICS = ("rewards/accuracies", "rewards/margins")
#: The label of tokens that are not trained on.
NOT_TRAINED = -100
#: Row formats of a single method; methods without a row format read all other formats.
METHOD_FORMATS = {method.row_format for method in METHODS.values() if method.has_own_format}


def methods_reading(row_format: str) -> list[str]:
    """Return the methods that read this row format."""
    own_formats = {row_format} if row_format in METHOD_FORMATS else {row_format, None}
    return [name for name, method in METHODS.items() if method.row_format in own_formats]
