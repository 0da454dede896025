"""The largest value of one setting that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from finetune.card.card import Card
from finetune.errors import CommandError, FinetuneError, ModelError, RecipeError
from finetune.model.configuration import read_config
from finetune.planner.choices import Choices
from finetune.planner.plan import DataStatistics, Plan
from finetune.planner.planner import MakeForecast, make_plan, plan_if_fits
from finetune.planner.planning import RowsRead, for_rows, prepared
from finetune.planner.resources import choose_budget
from finetune.planner.shape import ModelShape, shape_of
from finetune.planner.suggest import models_by_size
from finetune.printable import Progress
from finetune.recipe.load import NO_DATASET
from finetune.settings import AUTO, Recipe, resolved
from finetune.settings.base_formats import BITS_16, NF4, QUANTISED

#: Step of the tried values, their limit, and its name; max_length goes up to 2**20 if the model's configuration has no limit.
RANGES: dict[str, tuple[int, Callable[[ModelShape], int], str]] = {
    "max_length": (256, lambda shape: shape.max_positions or 2**20, "the model's own limit"),
    "lora_r": (8, lambda shape: shape.hidden, "the model's width"),
    "per_device_train_batch_size": (1, lambda _: 512, "the largest that is tried"),
}
#: Least bytes of CUDA context and activations.
LEAST_OTHER_BYTES = 2**29


@dataclass(frozen=True)
class Largest:
    """The largest value of a setting that fits, with its plan."""

    setting: str
    #: The name of a catalogue model for setting `model`; 0 if no value fits, with the least value's plan.
    value: int | str
    #: The next value, which may not fit; None where `value` is the `limit`.
    too_large: int | str | None
    limit: str
    #: Set the value.
    overrides: tuple[str, ...]
    plan: Plan

    @property
    def sentence(self) -> str:
        value, too_large = (f"{part:,}" if isinstance(part, int) else part for part in (self.value, self.too_large))
        if not self.value:
            return f"{self.setting}: {too_large} does not fit either"
        more = self.limit if too_large is None else f"{too_large} does not surely fit"
        return f"{self.setting}: {value} at most ({more})"


def plan_largest(
    recipe: Recipe, card: Card, rows: Callable[[Recipe], RowsRead], setting: str, progress: Progress = lambda _: None
) -> Largest:
    """Plan the largest value of a setting. Raises PackagesError and RecipeError."""
    recipe, renamed, reasons = prepared(recipe)
    read = rows(recipe) if setting not in ("max_length", "model") or _may_have_pictures(recipe) else RowsRead()
    if setting == "model":
        if read.has_pictures:
            raise RecipeError(
                "--largest model: the rows have pictures, and models of the catalogue are searched for rows of text",
                "Plan models of images and text one by one: finetune plan MODEL --images WIDTHxHEIGHT",
            )
        return find_largest_model(recipe, card, progress=progress)
    recipe, more_reasons = for_rows(recipe, read)
    largest = find_largest(recipe, card, setting, read.statistics, progress=progress)
    plan = largest.plan
    for note in (renamed, *read.notes):
        plan = plan.with_note(note)
    return replace(largest, plan=replace(plan, reasons={**plan.reasons, **reasons, **more_reasons}))


def _may_have_pictures(recipe: Recipe) -> bool:
    try:
        return recipe.dataset.path == NO_DATASET or "vision_config" in read_config(recipe)
    except ModelError:  # a search for a model does not need the recipe's model
        return False


def find_largest(
    recipe: Recipe, card: Card, setting: str, data: DataStatistics | None = None, *, forecaster: MakeForecast | None = None,
    progress: Progress = lambda _: None,
) -> Largest:  # fmt: skip
    """Bisect for the largest value that fits. Raises RecipeError."""
    if setting not in RANGES:
        raise RecipeError(
            f"--largest {setting}: the largest value is found of {', '.join(RANGES)}, model", "Name one of these."
        )
    step, most_of, limit = RANGES[setting]
    # max_length is planned for rows of max_length tokens, with the images of `data`
    data = data and data.only_pictures if setting == "max_length" else data

    def changes(value: int) -> dict[str, Any]:
        one_step = {"gradient_accumulation_steps": 1, "effective_batch_size": value * recipe.launch.num_processes}
        return {setting: value, **(one_step if setting == "per_device_train_batch_size" else {})}

    # a larger value never takes less memory
    plan, fitting, failing = None, 0, most_of(shape_of(read_config(recipe), recipe)) // step + 1
    most = tried = failing - 1  # where the limit itself fits, one plan is the answer
    while failing - fitting > 1:
        progress(f"planning {setting}={tried * step:,}")
        if larger := plan_if_fits(resolved(recipe, **changes(tried * step)), card, data, forecaster):
            plan, fitting = larger, tried
        else:
            failing = tried
        tried = (fitting + failing) // 2
    least = changes(fitting * step or step)
    plan = plan or make_plan(resolved(recipe, **least), card, data, forecaster=forecaster)
    too_large = failing * step if failing <= most else None
    return Largest(setting, fitting * step, too_large, limit, tuple(f"{name}={number}" for name, number in least.items()), plan)


def find_largest_model(
    recipe: Recipe, card: Card, *, forecaster: MakeForecast | None = None, progress: Progress = lambda _: None
) -> Largest:
    """Return the catalogue's largest model that fits. Raises CommandError."""
    # offload layers only if the recipe says so
    changes = {"layer_offloading": False} if recipe.layer_offloading == AUTO else {}
    _, budget = choose_budget(Choices(recipe), card)
    may_be_quantised = any(getattr(recipe, base_format.setting) is not False for base_format in QUANTISED)
    smallest_format = NF4 if may_be_quantised else BITS_16
    too_large = None
    for name, _ in models_by_size((budget - LEAST_OTHER_BYTES) / (0.9 * smallest_format.weight_bytes)):
        try:
            other = resolved(
                recipe, model_name_or_path=name, model_revision=None, trust_remote_code=False, chat_template=None, **changes
            )
            if changes and shape_of(read_config(other), other).weight_bytes(smallest_format) > budget - LEAST_OTHER_BYTES:
                continue
            progress(f"planning {name}")
            # no rows: another model has another tokenizer
            plan = plan_if_fits(other, card, None, forecaster)
        except (FinetuneError, ValueError):  # named layers that this model doesn't have, a row longer than its limit
            continue
        if plan is not None:
            overrides = (f"model_name_or_path={name}", *(f"{setting}=false" for setting in changes))
            return Largest("model", name, too_large, "the largest of the catalogue", overrides, plan)
        too_large = name
    raise CommandError("no model of the catalogue fits with this recipe", "Lower max_length, or the batch size.")
