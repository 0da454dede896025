"""The largest value of one setting with which a recipe's plan fits: a search over plans, each by its forecast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from finetune.card.card import Card
from finetune.errors import CommandError, FinetuneError, ModelError, RecipeError
from finetune.model.catalogue import entries
from finetune.model.configuration import read_config
from finetune.planner.choices import Choices
from finetune.planner.plan import DataStatistics, Plan
from finetune.planner.planner import MakeForecast, make_plan, plan_if_fits
from finetune.planner.planning import RowsRead, for_rows, prepared
from finetune.planner.resources import choose_budget
from finetune.planner.shape import ModelShape, shape_of
from finetune.printable import Progress
from finetune.recipe.load import NO_DATASET
from finetune.settings import AUTO, Recipe, resolved
from finetune.settings.base_formats import BITS_16, NF4, QUANTISED

#: Where a model's configuration names no limit.
MOST_TOKENS = 2**20
#: Bytes that neither weights nor adapters have: context and activations take at least so much.
LEAST_OTHER_BYTES = 2**29


@dataclass(frozen=True)
class Range:
    """Values of a setting that are tried: multiples of `step` up to `most`, which is `limit`. `settings` sets one."""

    step: int
    most: Callable[[ModelShape], int]
    limit: str
    settings: Callable[[int, Recipe], dict[str, Any]]


def _one_micro_batch(rows: int, recipe: Recipe) -> dict[str, Any]:
    """A step of one micro-batch, so that no effective batch limits it."""
    return {
        "per_device_train_batch_size": rows, "gradient_accumulation_steps": 1,
        "effective_batch_size": rows * recipe.launch.num_processes,
    }  # fmt: skip


RANGES = {
    "max_length": Range(
        256, lambda shape: shape.max_positions or MOST_TOKENS, "the model's own limit", lambda tokens, _: {"max_length": tokens}
    ),
    "lora_r": Range(8, lambda shape: shape.hidden, "the model's width", lambda rank, _: {"lora_r": rank}),
    "per_device_train_batch_size": Range(1, lambda _: 512, "the largest that is tried", _one_micro_batch),
}


@dataclass(frozen=True)
class Largest:
    """The largest `value` of a setting that fits, with its plan; 0 and the plan of the least value when that does not.

    `too_large`: the next value, which does not surely fit; None where `value` is the `limit`. `overrides` set the value. Of
    `model` they are names of the catalogue.
    """

    setting: str
    value: int | str
    too_large: int | str | None
    limit: str
    plan: Plan
    overrides: tuple[str, ...]

    @property
    def sentence(self) -> str:
        value, too_large = (f"{part:,}" if isinstance(part, int) else part for part in (self.value, self.too_large))
        if not self.value:
            return f"{self.setting}: {too_large} does not fit either"
        more = self.limit if too_large is None else f"{too_large} does not surely fit"
        return f"{self.setting}: {value} at most ({more})"

    def as_json(self) -> dict[str, Any]:
        """As documented in docs/plan-json.md."""
        return {
            "setting": self.setting, "value": self.value, "too_large": self.too_large, "limit": self.limit,
            "overrides": list(self.overrides), "plan": self.plan.as_json(),
        }  # fmt: skip


def plan_largest(
    recipe: Recipe, card: Card, rows: Callable[[Recipe], RowsRead], setting: str, *, progress: Progress | None = None
) -> Largest:
    """The largest value of a setting that fits, with its plan. `max_length` is planned for full rows, which are read only for
    their pictures.

    Raises PackagesError and RecipeError.
    """
    recipe, renamed, reasons = prepared(recipe)
    read = rows(recipe) if setting not in ("max_length", "model") or _may_have_pictures(recipe) else RowsRead()
    if setting == "model":
        if read.has_pictures:
            raise RecipeError(
                "--largest model: the rows have pictures, and models of the catalogue are searched for rows of text",
                "Plan models of images and text one by one: finetune plan MODEL --images WIDTHxHEIGHT",
            )
        name, too_large, plan, overrides = find_largest_model(recipe, card, progress=progress)
        return Largest(setting, name, too_large, "the largest of the catalogue", plan, overrides)
    recipe, more_reasons = for_rows(recipe, read)
    largest = find_largest(recipe, card, setting, read.statistics, progress=progress)
    plan = largest.plan
    for note in (renamed, *read.notes):
        plan = plan.with_note(note)
    return replace(largest, plan=replace(plan, reasons={**plan.reasons, **reasons, **more_reasons}))


def _may_have_pictures(recipe: Recipe) -> bool:
    """Whether the rows may have pictures, without reading them; where no data is given there is nothing to read."""
    try:
        return recipe.dataset.path == NO_DATASET or "vision_config" in read_config(recipe)
    except ModelError:  # `model` is searched whether that of the recipe is here or not
        return False


def find_largest(
    recipe: Recipe, card: Card, setting: str, data: DataStatistics | None = None, *, forecaster: MakeForecast | None = None,
    progress: Progress | None = None,
) -> Largest:  # fmt: skip
    """Return the largest value of `setting` that fits, by bisection: a larger value never takes less memory.

    `max_length` is planned for rows of `max_length` tokens, with the pictures of `data`.

    Raises RecipeError for another setting, and when the recipe can't be planned.
    """
    if setting not in RANGES:
        raise RecipeError(
            f"--largest {setting}: the largest value is found of {', '.join(RANGES)}, model", "Name one of these."
        )
    searched, report_progress = RANGES[setting], progress or (lambda _: None)
    data = data and data.only_pictures if setting == "max_length" else data

    def with_value(value: int) -> Recipe:
        return resolved(recipe, **searched.settings(value, recipe))

    most = searched.most(shape_of(read_config(recipe), recipe))
    fitting, count = 0, most // searched.step + 1
    plans: dict[int, Plan] = {}
    tried = count - 1  # where the limit itself fits, one plan is the answer
    while count - fitting > 1:
        value = tried * searched.step
        report_progress(f"planning {setting}={value:,}")
        if plan := plan_if_fits(with_value(value), card, data, forecaster):
            fitting, plans[tried] = tried, plan
        else:
            count = tried
        tried = (fitting + count) // 2
    too_large = None if count * searched.step > most else count * searched.step
    plan = plans.get(fitting) or make_plan(with_value(searched.step), card, data, forecaster=forecaster)
    value = fitting * searched.step
    overrides = tuple(f"{name}={number}" for name, number in searched.settings(value or searched.step, recipe).items())
    return Largest(setting, value, too_large, searched.limit, plan, overrides)


def find_largest_model(
    recipe: Recipe, card: Card, *, forecaster: MakeForecast | None = None, progress: Progress | None = None
) -> tuple[str, str | None, Plan, tuple[str, ...]]:
    """The model, the next larger one that was tried and does not fit, the plan, and the overrides that give it.

    Planned for rows of max_length, as another model has another tokenizer; without offloaded layers, unless the recipe has
    them. From the most parameters down, without those whose weights alone are too large. Raises CommandError when none fits.
    """
    report_progress = progress or (lambda _: None)
    changes = {"layer_offloading": False} if recipe.layer_offloading == AUTO else {}
    _, budget = choose_budget(Choices(recipe), card)
    may_be_quantised = any(getattr(recipe, base_format.setting) is not False for base_format in QUANTISED)
    smallest_format = NF4 if may_be_quantised else BITS_16
    ranked = sorted(entries().items(), key=lambda item: (-item[1].parameters, item[0]))
    too_large = None
    for name, entry in ranked:
        if not entry.first or smallest_format.weight_bytes * entry.parameters * 0.9 > budget - LEAST_OTHER_BYTES:
            continue
        try:
            other = resolved(
                recipe, model_name_or_path=name, model_revision=None, trust_remote_code=False, chat_template=None, **changes
            )
            weights = shape_of(read_config(other), other).weight_bytes(smallest_format)
            if changes and weights > budget - LEAST_OTHER_BYTES:
                continue
            report_progress(f"planning {name}")
            plan = plan_if_fits(other, card, None, forecaster)
        except (FinetuneError, ValueError):  # named layers that this model doesn't have, a row longer than its limit
            continue
        if plan is not None:
            overrides = [f"{setting}={str(value).lower()}" for setting, value in changes.items()]
            return name, too_large, plan, (f"model_name_or_path={name}", *overrides)
        too_large = name
    raise CommandError("no model of the catalogue fits with this recipe", "Lower max_length, or the batch size.")
