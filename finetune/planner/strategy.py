"""Strategies: settings that trade memory for time, and the price of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from finetune.card.card import Card
from finetune.errors import RecipeError
from finetune.planner.plan import Choices
from finetune.planner.shape import ModelShape
from finetune.settings import AUTO
from finetune.settings.base_formats import BITS_16, BITS_32, NF4, QUANTISED, BaseFormat, is_open, switches
from finetune.settings.compatibility import NOT_REENTRANT, layer_offloading_conflict
from finetune.settings.optimizers import OPTIMIZERS

#: Gradient checkpointing in order of time cost: (activation_checkpointing, every n-th layer). n above 3 gains little, and its
#: dry run takes 3 n layers.
CHECKPOINTING: tuple[tuple[bool | str, int], ...] = (
    (False, 1), (True, 3), (True, 2), ("selective", 1), (True, 1), ("offload", 1),
)  # fmt: skip
#: Where the weights of offloaded layers are: not offloaded, in host memory, or in a file.
OffloadTarget = Literal[False, "cpu", "nvme"]
OFFLOAD_TARGETS: tuple[OffloadTarget, ...] = ("cpu", "nvme")

#: Factors on step time: how much faster a strategy must be to justify each departure from the simplest settings.
HOST_TABLE_PRICE = 1.02
CHECKPOINTING_PRICE = {False: 1.0, True: 1.01, "selective": 1.02, "offload": 1.05}
#: How many numbers of offloaded layers are tried, from all layers down.
LAYER_COUNTS = 8
#: Factor for a doubled micro-batch: a smaller micro-batch leaves headroom and pads less.
DOUBLING_PRICE = 1.01


@dataclass(frozen=True)
class Strategy:
    """Weight format, gradient checkpointing, optimizer, micro-batch and offloading."""

    base: BaseFormat
    checkpointing: bool | str
    every_n: int
    optim: str
    micro: int
    #: The input embedding is in host memory.
    host_table: bool = False
    #: Decoder layers whose weights are in `offload_target`.
    offloaded: int = 0
    offload_target: OffloadTarget = False

    @property
    def price(self) -> float:
        kinds = self.base.price * OPTIMIZERS[self.optim].price * CHECKPOINTING_PRICE[self.checkpointing]
        return kinds * DOUBLING_PRICE ** math.log2(self.micro) * (HOST_TABLE_PRICE if self.host_table else 1.0)

    def recomputed_layers(self, layers: int) -> int:
        return 0 if self.checkpointing is False else math.ceil(layers / self.every_n)

    def settings(self, batch: int, world: int) -> dict[str, Any]:
        """Return the recipe settings for an effective batch at world size `world`."""
        return {
            **switches(self.base), "optim": self.optim,
            "activation_checkpointing": self.checkpointing, "activation_checkpointing_every_n_layers": self.every_n,
            "offload_embeddings": self.host_table, "layer_offloading": self.offload_target, "offloaded_layers": self.offloaded,
            "per_device_train_batch_size": self.micro, "gradient_accumulation_steps": batch // (world * self.micro),
        }  # fmt: skip

    @property
    def checkpointing_summary(self) -> str:
        if self.checkpointing is True and self.every_n > 1:
            return f"1 layer in {self.every_n} recomputed"
        return {
            False: "nothing recomputed", True: "every layer recomputed", "selective": "recomputed except attention",
            "offload": "recomputed, layer inputs offloaded",
        }[self.checkpointing]  # fmt: skip


def strategies(
    choices: Choices, card: Card, shape: ModelShape, target: OffloadTarget, stored: tuple[BaseFormat, ...]
) -> list[Strategy]:
    """Return every strategy that the recipe leaves open on this GPU."""
    # `stored`: the formats that a quantised checkpoint allows
    bases, kinds, counts = list(_formats(choices, card, stored)), _checkpointing(choices, card), [0]
    has_table = shape.table > 0 and not choices.recipe.trained_embedding_rows
    may_offload_table = has_table and not card.is_cpu and not choices.recipe.launch.is_sharded
    tables: tuple[bool, ...] = (False, True) if may_offload_table else (False,)
    if choices.is_set("offload_embeddings"):
        tables = (choices.recipe.offload_embeddings,)
    if target:
        if layer_offloading_conflict(choices.recipe):
            return []
        # every step moves the weights, so take the smallest format; fetched layers are recomputed
        bases = sorted((base for base in bases if not base.not_offloaded), key=lambda base: base.weight_bytes)[:1]
        kinds = tuple(kind for kind in kinds if kind[0] is not False and kind[1] == 1)
        counts = _counts(choices, shape.layers)
    combinations = itertools.product(bases, kinds, _optimizers(choices, card), _micro_batches(choices), tables, counts)
    return [
        Strategy(base, checkpointing, every_n, optim, micro, host_table, count, target)
        for base, (checkpointing, every_n), optim, micro, host_table, count in combinations
        if target or checkpointing == "offload" or not host_table or len(tables) == 1  # otherwise not worth the copies
    ]


def _counts(choices: Choices, layers: int) -> list[int]:
    wanted = choices.recipe.offloaded_layers
    if wanted == AUTO:
        return sorted({max(1, layers * part // LAYER_COUNTS) for part in range(1, LAYER_COUNTS + 1)}, reverse=True)
    if wanted > layers:
        raise RecipeError(
            f"offloaded_layers is {wanted}, the model has {layers} decoder layers",
            f"Set offloaded_layers to at most {layers}, or leave it out.",
        )
    return [wanted]


def neighbours(chosen: Strategy, candidates: list[Strategy]) -> list[Strategy]:
    """Return the candidates one step away from the chosen strategy."""
    # the chosen strategy may be missing: the smallest is planned when no forecast fits
    every = [chosen, *candidates]
    present = {(strategy.checkpointing, strategy.every_n) for strategy in every}
    # the recipe may set another n than those of CHECKPOINTING
    kinds = sorted(present, key=lambda kind: CHECKPOINTING.index(kind) if kind in CHECKPOINTING else 1)
    wanted = [
        *(replace(chosen, base=base) for base in sorted({strategy.base for strategy in every}, key=lambda base: base.bits)),
        *(
            replace(chosen, checkpointing=kind, every_n=steps)
            for kind, steps in [*_adjacent((chosen.checkpointing, chosen.every_n), kinds), (True, 1)]
        ),
        *(replace(chosen, micro=micro) for micro in _adjacent(chosen.micro, sorted({strategy.micro for strategy in every}))),
    ]
    return [strategy for strategy in dict.fromkeys(wanted) if strategy in candidates and strategy != chosen]


def _adjacent(value: Any, ordered: list[Any]) -> list[Any]:
    index = ordered.index(value)
    return ordered[max(0, index - 1) : index + 2]


def _formats(choices: Choices, card: Card, stored: tuple[BaseFormat, ...]) -> tuple[BaseFormat, ...]:
    recipe, plain = choices.recipe, BITS_32 if choices.value("dtype") == "float32" else BITS_16
    if requested := recipe.requested_formats:
        return (requested[0],)
    # int8's kernels compute in float16, and break the graphs of compiled layers
    exact = QUANTISED if plain is BITS_16 and recipe.torch_compile is not True else (NF4,)
    still_open = tuple(base for base in exact if is_open(recipe, base))
    if stored:
        return stored if len(stored) == 1 or stored[-1] in still_open else (plain,)
    if card.is_cpu:
        return (plain,)
    return (plain, *(base for base in reversed(still_open) if base.planned and (base.shards or not recipe.launch.is_sharded)))


def _checkpointing(choices: Choices, card: Card) -> tuple[tuple[bool | str, int], ...]:
    wanted, every = choices.recipe.activation_checkpointing, choices.recipe.activation_checkpointing_every_n_layers
    kinds = CHECKPOINTING
    if choices.recipe.launch.is_zero3:
        kinds = tuple(kind for kind in kinds if kind[0] not in NOT_REENTRANT)
    if card.is_cpu or (choices.recipe.torch_compile is True and every not in (AUTO, 1)):
        # offloading pins memory, which needs an accelerator; compiled layers offload the inputs of all layers or of none
        kinds = tuple(kind for kind in kinds if kind[0] != "offload")
    if wanted != AUTO:
        steps = (3, 2, 1) if wanted is True else (1,)
        kinds = tuple((wanted, step) for step in steps)
    if every != AUTO:
        kinds = tuple(dict.fromkeys((kind, every if kind is True else 1) for kind, _ in kinds))
    return kinds


def _optimizers(choices: Choices, card: Card) -> tuple[str, ...]:
    if choices.is_set("optim"):
        return (choices.recipe.optim,)
    if card.is_cpu:
        return ("adamw_torch",)
    sharded = choices.recipe.launch.is_sharded
    return tuple(name for name, optimizer in OPTIMIZERS.items() if optimizer.planned and (optimizer.shards or not sharded))


def _micro_batches(choices: Choices) -> Iterator[int]:
    recipe = choices.recipe
    rows = choices.value("effective_batch_size") // recipe.launch.num_processes
    if recipe.per_device_train_batch_size != AUTO:
        yield recipe.per_device_train_batch_size
    elif recipe.gradient_accumulation_steps != AUTO:
        yield rows // recipe.gradient_accumulation_steps
    else:
        yield from (micro for micro in range(recipe.training_method.min_rows, rows + 1) if rows % micro == 0)
