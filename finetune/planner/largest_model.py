"""The largest model of the catalogue with which a recipe's plan fits, all its layers on the GPU."""

from __future__ import annotations

from finetune.card.card import Card
from finetune.errors import CommandError, FinetuneError
from finetune.model.catalogue import entries
from finetune.model.configuration import read_config
from finetune.planner.budget import choose_budget
from finetune.planner.choices import Choices
from finetune.planner.plan import Plan
from finetune.planner.planner import MakeForecast, Progress, plan_if_fits
from finetune.planner.shape import shape_of
from finetune.settings import AUTO, Recipe, resolved
from finetune.settings.base_formats import BITS_16, NF4, QUANTISED

#: Bytes that neither weights nor adapters have: context and activations take at least so much.
LEAST_OTHER_BYTES = 2**29


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
