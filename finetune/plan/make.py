"""Make the plan: recipe + card + data statistics -> the fastest settings that fit, with reasons, forecast and verdict."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from finetune.card.card import Card
from finetune.forecast import Forecast, make_forecast
from finetune.model.configuration import read_config
from finetune.plan.advice import RANKS, advise_alpha
from finetune.plan.budget import choose_budget
from finetune.plan.choices import Choices
from finetune.plan.defaults import choose_basics, choose_cadence, total_steps
from finetune.plan.explain import alternatives, explain_strategy, words
from finetune.plan.history import History, read_history
from finetune.plan.lengths import Lengths, length_costs
from finetune.plan.many_cards import needs_of_each_card
from finetune.plan.plan import DataStatistics, Plan
from finetune.plan.resources import check_resources
from finetune.plan.search import FITS, NO_FIT, Anchor, Search, verdict_of
from finetune.plan.shape import shape_of
from finetune.plan.speed import Job, knows_rates
from finetune.plan.strategy import Strategy, next_to, strategies
from finetune.plan.suggest import largest_model, shortfall_of, suggest
from finetune.recipe import AUTO, Recipe, resolved

Progress = Callable[[str], None]
#: `make_forecast`, or another with its signature.
MakeForecast = Callable[..., Forecast]


def make_plan(
    recipe: Recipe,
    card: Card,
    data: DataStatistics | None,
    *,
    forecaster: MakeForecast | None = None,
    progress: Progress | None = None,
    compare: bool = False,
) -> Plan:
    """Resolve every `auto` of the recipe for this card and data. Raises RecipeError when the recipe can't be planned.

    `progress` is told each step in words; `forecaster` stands in for the dry run. `compare`: a plan that fits, tightly too, is
    shown beside forecasts of what is next to it, not only of what the search came by. The same inputs, what was measured on
    the card among them, give the same settings.
    """
    inputs = (recipe, card, data, forecaster or make_forecast, progress or (lambda _: None))
    planner = _Planner(*inputs)
    if planner.settle() != FITS and recipe.packing == AUTO and planner.choices.value("packing"):
        single = _Planner(*inputs, no_room=True)
        planner = single if single.settle() == FITS else planner
    if compare:
        planner.compare()
    return planner.plan()


class _Planner:
    """One call of make_plan: what it knows, and the steps it takes."""

    def __init__(
        self, recipe: Recipe, card: Card, data: DataStatistics | None, forecaster: MakeForecast, progress: Progress,
        no_room: bool = False,
    ) -> None:  # fmt: skip
        self.recipe, self.card, self.data, self.forecaster, self.tell = recipe, card, data, forecaster, progress
        self.choices = Choices(recipe)
        self.budget = choose_budget(self.choices, card)
        self.tell("reading the model's configuration")
        self.config = read_config(recipe)
        self.shape = shape_of(self.config, recipe)
        choose_basics(self.choices, card, self.config, self.shape, data, no_room)
        self.lengths = Lengths(self.choices, data)
        self.advised_rank: int = self.choices.value("lora_r")
        self.history = read_history(card.name)
        job = Job(
            shape=self.shape, card=card, batches=self.lengths.batches(self.lengths.first),
            batch=self.choices.value("effective_batch_size"), world=recipe.launch.num_processes,
            rank=self.choices.value("lora_r"), compiled=recipe.torch_compile, offloading=recipe.activation_offloading,
        )  # fmt: skip
        self.search = Search(job, self.budget, self._forecast)

    def settle(self) -> str:
        """Search. Returns the verdict on what was found, which is what `plan` explains."""
        self.chosen = self._settle()
        return verdict_of(self.chosen.forecast, self.budget)

    def compare(self) -> None:
        """Forecast what is next to the chosen strategy, unless that does not fit."""
        if verdict_of(self.chosen.forecast, self.budget) != NO_FIT:
            for strategy in next_to(self.chosen.strategy, self.search.able(self._open_strategies())):
                self.search.forecast(strategy, self.chosen.width)

    def plan(self) -> Plan:
        """The plan with reasons, forecast and alternatives. After `settle`."""
        chosen = self.chosen
        factor = self.history.speed_factor or 1.0
        explain_strategy(self.choices, self.search, chosen)
        steps = choose_cadence(self.choices, self.data)
        settings = self.choices.settings()
        timing, known = self.search.timing(chosen.strategy), knows_rates(self.card)
        forecast = dataclasses.replace(
            chosen.forecast,
            step_s=timing.step_s * factor if known else None,
            tokens_per_s=timing.tokens_per_s / factor if known else None,
            notes=(*chosen.forecast.notes, *_notes_of(self.history, self.card)),
        )
        verdict = verdict_of(forecast, self.budget)
        return Plan(
            settings=settings, reasons=self.choices.reasons, card=self.card, verdict=verdict, total_steps=steps,
            forecast=forecast, data=self.data, alternatives=alternatives(self.search, chosen, factor, self.choices),
            budget_bytes=self.budget, headroom_bytes=self.budget - forecast.peak_high_bytes,
            modelled_step_s=timing.step_s if known else None, length_costs=length_costs(self.search, chosen),
            checks=check_resources(settings, self.shape, forecast, self.card), many_cards=self._many_cards(settings, verdict),
            **(self._lacking(settings, forecast) if verdict != FITS else {}),
        )  # fmt: skip

    def _settle(self) -> Anchor:
        """The fastest strategy that fits; else a shorter limit where the recipe leaves that open; else what takes least."""
        open_strategies = self._open_strategies()
        for length, rank in itertools.product(self.lengths.open(), self._ranks()):
            width = self._take(length, rank)
            if self.recipe.launch.strategy != "ddp":  # a guess knows whole models only: begin from what takes least
                self.search.smallest(open_strategies, width)
            found = self.search.find(open_strategies, width)
            if found is None and self.search.could_fit(open_strategies, width):
                found = self.search.smallest(open_strategies, width)
            if found is not None and verdict_of(found.forecast, self.budget) == FITS:
                return found
        return self.search.smallest(open_strategies, self._take(self.lengths.first, self._ranks()[0]))

    def _open_strategies(self) -> list[Strategy]:
        return strategies(self.choices, self.card, _stored_bits(self.config))

    def _ranks(self) -> list[int]:
        """The advised rank, and lower ones where the recipe leaves that open."""
        if self.choices.is_set("lora_r"):
            return [self.advised_rank]
        return [self.advised_rank, *(rank for rank in reversed(RANKS) if rank < self.advised_rank)]

    def _take(self, length: int, rank: int) -> int:
        """Plan on with this limit of length and this rank; returns the width of the worst row."""
        self.search.job = dataclasses.replace(self.search.job, batches=self.lengths.take(length), rank=rank)
        if rank != self.choices.value("lora_r"):
            self.choices.choose("lora_r", rank, f"rank {self.advised_rank} would hold more of the data, but does not fit")
            self.choices.choose("lora_alpha", *advise_alpha(self.recipe, rank))
        return self.search.job.batches.longest

    def _settings_for(self, strategy: Strategy) -> Recipe:
        """The recipe resolved to a strategy, to be forecast."""
        job = self.search.job
        wanted = {**strategy.settings(job.batch, job.world), "per_device_eval_batch_size": strategy.micro}
        settings = self.choices.settings(**self._open(wanted))
        every = max(1, (total_steps(settings, self.data) or 1000) // 10)
        return resolved(settings, **self._open({"eval_steps": every, "save_steps": every}))

    def _open(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if not self.choices.is_set(name)}

    def _forecast(self, strategy: Strategy, width: int) -> Forecast:
        """The dry run of a strategy with rows of `width` tokens."""
        job = self.search.job
        self.tell(f"forecasting {words(strategy, job.batch, job.world)}, {width:,} tokens a row")
        return self._made(self.config, self._settings_for(strategy), width)

    def _made(self, config: dict[str, Any], settings: Recipe, width: int) -> Forecast:
        """A forecast whose upper end is raised by what runs on this card took beyond theirs."""
        forecast = self.forecaster(config, settings, self.card, tokens=width)
        more = round(self.history.worst_excess * forecast.allocated_bytes)
        return dataclasses.replace(forecast, peak_high_bytes=forecast.peak_high_bytes + more)

    def _many_cards(self, settings: Recipe, verdict: str) -> dict[str, Any] | None:
        """Needs of each card under every strategy, when one is too small or the launch splits the model."""
        launch = settings.launch
        wanted = verdict == NO_FIT or launch.strategy != "ddp" or (launch.num_processes > 1 and verdict != FITS)
        if self.card.is_cpu or not wanted:
            return None
        self.tell("forecasting each of several cards")
        width = min(settings.max_length, self.search.job.batches.longest)
        return needs_of_each_card(self.recipe, settings, self.budget, lambda changed: self._made(self.config, changed, width))

    def _lacking(self, settings: Recipe, forecast: Forecast) -> dict[str, Any]:
        """What is missing, what would help, and the largest model that fits."""
        longest = self.search.job.batches.longest

        def forecast_of(changed: Recipe) -> Forecast:
            self.tell("forecasting a cheaper setting")
            return self._made(self.config, changed, min(changed.max_length, longest))

        def forecast_model(config: dict[str, Any], changed: Recipe) -> Forecast:
            self.tell(f"forecasting {changed.model_name_or_path}")
            return self._made(config, changed, longest)

        suggestions = suggest(self.recipe, settings, forecast, forecast_of, self.data)
        if verdict_of(forecast, self.budget) != NO_FIT:
            return {"suggestions": suggestions}
        largest = largest_model(self.recipe, settings, self.budget, forecast_model)
        return {"suggestions": suggestions, "shortfall": shortfall_of(forecast, self.budget, largest)}


def _stored_bits(config: dict[str, Any]) -> int | None:
    """Bits of a checkpoint that is stored quantised by bitsandbytes; other stored formats train in 16 bit or not at all."""
    own = config.get("quantization_config")
    if not own:
        return None
    if own.get("quant_method") == "bitsandbytes":
        return 4 if own.get("load_in_4bit") else 8
    return 16


def _notes_of(history: History, card: Card) -> tuple[str, ...]:
    if not history.runs:
        return ()
    notes = [f"{history.runs} earlier run(s) on {card.name}"]
    if history.speed_factor is not None:
        notes.append(f"steps took {history.speed_factor:.2f} times the modelled time")
    if history.memory_errors:
        least, most = min(history.memory_errors), max(history.memory_errors)
        notes.append(f"allocated memory was {least:+.1%} to {most:+.1%} of the forecast")
    return ("; ".join(notes),)
