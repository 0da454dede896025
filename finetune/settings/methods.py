"""The training methods of a recipe's `method`: a row for each, with the facts that data, forecast and planner need. The
computation is in finetune/methods. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Method:
    """`implementation`: its module and class. `sequences`: tokenised sequences of a row, all in one
    micro-batch. `reference_passes`: forward passes without gradients beside each training pass. `min_rows`: fewest rows of a
    micro-batch.

    `row_format`: the only format of its rows; None: any format with one answer, and text. `settings`: settings that other
    methods need not read. `losses`: its values of `loss_type`, the default first. `refused`: other settings that don't work
    with this method, and why. `rate_factor`: the learning rate as a multiple of SFT's; `rate_source`: who found that, a name.
    `precomputes`: whether the reference can be computed before the training.
    """

    implementation: str = "finetune.methods.method:Sft"
    sequences: int = 1
    reference_passes: int = 0
    min_rows: int = 1
    row_format: str | None = None
    losses: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    rate_factor: float = 1.0
    rate_source: str = ""
    precomputes: bool = False

    @property
    def has_own_format(self) -> bool:
        """Whether its rows are in a format that no other method reads; plain text is for two."""
        return self.row_format not in (None, "text")

    @property
    def packs(self) -> bool:
        """Whether rows can be packed."""
        return "packing" not in dict(self.refused)


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
        implementation="finetune.methods.dpo:Dpo", sequences=2, reference_passes=1, row_format="preference", precomputes=True,
        losses=("sigmoid", "robust", "ipo", "hinge", "apo_zero", "apo_down", "sppo_hard"),
        settings=("beta", "loss_type", "label_smoothing", "sft_weight"),
        rate_factor=0.025, rate_source="TRL: dpo.py, sft.py",  # 5e-6 and 2e-4 with LoRA
        refused=(
            ("packing", "pairs are not packed"),
            ("train_on_inputs", "the prompt is the same in both answers of a pair"),
        ),
    ),
    "kto": Method(
        implementation="finetune.methods.kto:Kto", reference_passes=3, min_rows=2, row_format="labelled",
        losses=("kto", "apo_zero_unpaired"),
        settings=("beta", "loss_type", "desirable_weight", "undesirable_weight"),
        rate_factor=0.025, rate_source="DPO",
        refused=(
            ("packing", "its rows are not packed"),
            ("train_on_inputs", "only answers are good or bad"),
        ),
    ),
}  # fmt: skip
#: Values of settings that a method has where a recipe gives none.
USUAL_VALUES: dict[str, dict[str, Any]] = {"pretrain": {"excess_length": "chunk"}}
#: Metrics of methods, by the names in events -> label and format.
METRICS = {
    "rewards/accuracies": ("answers in order", "{:.1%}"), "rewards/margins": ("reward margin", "{:.3g}"),
    "rewards/chosen": ("reward of chosen", "{:.3g}"), "rewards/rejected": ("reward of rejected", "{:.3g}"),
    "kl": ("KL", "{:.3g}"),
}  # fmt: skip
#: Those of one line.
MAIN_METRICS = ("rewards/accuracies", "rewards/margins")
#: Formats that only some methods read, all others are for those without one.
METHOD_FORMATS = {method.row_format for method in METHODS.values() if method.has_own_format}


def has_kl(method: str, loss_type: str | None) -> bool:
    """Whether the loss has a KL term, from a second batch of mismatched answers."""
    return method == "kto" and loss_type != "apo_zero_unpaired"


def min_rows(recipe: Any) -> int:
    """Fewest rows of a micro-batch: the KL term needs an answer to another prompt."""
    return METHODS[recipe.method].min_rows if has_kl(recipe.method, recipe.loss_type) else 1


def method_of(recipe: Any, *, precomputes: bool = False) -> Method:
    """The row of a recipe's method, with the forward passes of its loss. `precomputes`: the reference's are made before."""
    method = METHODS.get(recipe.method, METHODS["sft"])  # not decided yet
    if precomputes:
        return replace(method, reference_passes=0)
    return method if method.min_rows == 1 or has_kl(recipe.method, recipe.loss_type) else replace(method, reference_passes=1)


def methods_reading(row_format: str) -> list[str]:
    """The methods that read rows of this format."""
    others = {None, row_format} - ({None} if row_format in METHOD_FORMATS else set())
    return [name for name, method in METHODS.items() if method.row_format in others]
