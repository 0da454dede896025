"""A one-line reason for each memory setting."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from finetune.planner.plan import Alternative, Choices, as_overrides, verdict_of
from finetune.planner.speed import Job, layer_copies_of
from finetune.planner.strategy import Strategy
from finetune.settings import Recipe
from finetune.settings.base_formats import BITS_16, BITS_32, NF4, QUANTISED
from finetune.settings.compatibility import BUFFERS, layer_offloading_conflict
from finetune.settings.optimizers import EIGHT_BIT, FUSED, OPTIMIZERS
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.planner.search import EvaluatedStrategy, Search

#: Held-out prompts answered at each evaluation when the recipe doesn't say.
USUAL_SAMPLES = 3
#: Where offloaded layers are, in a plan's summary.
OFFLOAD_LABELS = {"cpu": "offloaded", "nvme": "offloaded to a file"}


class Comparison:
    """The chosen strategy compared with strategies that differ in one setting."""

    def __init__(self, search: Search, chosen: EvaluatedStrategy) -> None:
        self.search, self.chosen = search, chosen
        self.strategy = chosen.strategy
        self.copies = layer_copies_of(search.timing(self.strategy), chosen.forecast, search.job.card)

    def against(self, **change: Any) -> str:
        """Compare with a changed strategy: `saves 4.2 GiB and costs 31% of time`."""
        other = replace(self.strategy, **change)
        saved_bytes = self.high_bytes(**change) - self.chosen.forecast.peak_high_bytes
        slowdown = self.search.timing(self.strategy).step_s / self.search.timing(other).step_s - 1
        size = ("" if self.search.lookup(other) else "about ") + format_bytes(abs(saved_bytes))  # estimated without a forecast
        memory = f"saves {size}" if saved_bytes >= 0 else f"takes {size} more"
        if abs(slowdown) < 0.005:  # would be printed as 0 %
            return f"{memory} at the same speed"
        if slowdown > 0:
            return f"{memory} and costs {slowdown:.0%} of time"
        return f"{memory} and {'saves' if saved_bytes < 0 else 'also'} {-slowdown:.0%} of time"

    def fits(self, **change: Any) -> bool:
        return self.search.fits(replace(self.strategy, **change))

    def high_bytes(self, **change: Any) -> int:
        return self.search.high_bytes(replace(self.strategy, **change))


def explain_strategy(choices: Choices, search: Search, chosen: EvaluatedStrategy) -> Choices:
    """Resolve the memory settings to the chosen strategy, with reasons."""
    job, strategy = search.job, chosen.strategy
    compare = Comparison(search, chosen)
    values = strategy.settings(job.batch, job.world)
    base_reason = _explain_format(compare, job.card.is_cpu)
    embedding_reason = "needed only if little else fits" if job.shape.table else "the output layer shares the embedding"
    if strategy.host_table:
        embedding_reason = f"{compare.against(host_table=False)} vs keeping it on the GPU"
    reasons = {
        **{base.setting: base_reason if base is strategy.base else base.reason_against or base_reason for base in QUANTISED},
        "optim": _explain_optimizer(compare),
        "activation_checkpointing": _explain_checkpointing(compare),
        "activation_checkpointing_every_n_layers": strategy.checkpointing_summary,
        "offload_embeddings": embedding_reason,
        "layer_offloading": _explain_offloading(compare, choices.recipe), "offloaded_layers": _explain_offloaded_count(compare),
        "per_device_train_batch_size": _explain_micro_batch(compare),
        "gradient_accumulation_steps": f"keeps the effective batch at {job.batch}",
    }  # fmt: skip
    for name, reason in reasons.items():
        choices = choices.choose(name, values[name], reason)
    base = strategy.base
    if base.setting and job.shape.experts and not base.experts:  # formats of linear layers leave fused experts in 16 bit
        experts = f"; experts stay 16-bit: {base.label} is for linear layers; {NF4.setting} quantises experts, too"
        choices = choices.with_reason(base.setting, choices.reasons[base.setting] + experts)
    samples, why = USUAL_SAMPLES, "shows how answers change during training"
    if compare.copies:  # generation moves every offloaded layer for each token
        samples, why = 0, f"each token of an answer would copy {compare.copies.summary_per_token}"
    choices = choices.choose("sample_answers", samples, why)
    return choices.choose("per_device_eval_batch_size", strategy.micro, "as in training; evaluation saves no activations")


def _explain_format(compare: Comparison, on_cpu: bool) -> str:
    base = compare.strategy.base
    if base not in QUANTISED:
        if on_cpu:
            return "no quantisation on CPU unless the recipe asks for it"
        return f"{base.title} weights fit: no dequantisation; {compare.against(base=NF4)} vs {NF4.label}"
    plain = BITS_32 if compare.search.job.float32 else BITS_16
    why = "" if compare.fits(base=plain) else ", which do not fit"
    return f"{base.label} {compare.against(base=plain)} vs {plain.title} weights{why}"


def _explain_optimizer(compare: Comparison) -> str:
    optim = compare.strategy.optim
    if optim == "adamw_torch":
        return "torch's AdamW"
    if optim == FUSED:
        saved_bytes = compare.high_bytes() - compare.high_bytes(optim=EIGHT_BIT)
        return f"one kernel for all adapters; 8-bit states would save only about {format_bytes(max(0, saved_bytes))}"
    return f"{compare.against(optim=FUSED)} vs fused AdamW"


def _explain_checkpointing(compare: Comparison) -> str:
    strategy = compare.strategy
    if strategy.offloaded:
        return f"{strategy.checkpointing_summary}: layer offloading fetches each layer again to recompute it"
    if strategy.checkpointing is False:
        return f"fits without recomputing; {compare.against(checkpointing=True)} vs recomputing every layer"
    misfit = "" if compare.fits(checkpointing=False, every_n=1) else ", which does not fit"
    return f"{strategy.checkpointing_summary}: {compare.against(checkpointing=False, every_n=1)} vs recomputing nothing{misfit}"


def _explain_offloading(compare: Comparison, recipe: Recipe) -> str:
    strategy, copies = compare.strategy, compare.copies
    if copies is None:
        if compare.search.job.card.is_cpu:
            return "the weights are in host memory"
        forecast = compare.chosen.forecast
        if forecast.at_limit or verdict_of(forecast, compare.search.budget_bytes).fits:
            return "the weights of all layers fit on the GPU"
        conflict = layer_offloading_conflict(recipe)
        return f"does not work with {conflict}" if conflict else "it would not free enough memory either"
    where = "host memory" if strategy.offload_target == "cpu" else "a file"
    return f"the weights of all layers do not fit on the GPU; from {where} it {copies.summary}"


def _explain_offloaded_count(compare: Comparison) -> str:
    strategy, layers = compare.strategy, compare.search.job.shape.layers
    if not strategy.offloaded:
        return "layer_offloading is false"
    if strategy.offloaded == layers:
        return f"all layers; {BUFFERS} are on the GPU at a time"
    return f"the other {layers - strategy.offloaded} layers fit on the GPU: {compare.against(offloaded=layers)} vs all {layers}"


def _explain_micro_batch(compare: Comparison) -> str:
    micro, batch, world = compare.strategy.micro, compare.search.job.batch, compare.search.job.world
    larger = next((size for size in range(micro + 1, batch // world + 1) if batch % (size * world) == 0), None)
    if larger is None:
        return "the whole effective batch"
    if not compare.fits(micro=larger):
        return f"{larger} rows would not fit"
    return f"{compare.against(micro=larger)} vs {larger} rows"


def alternatives(
    search: Search, chosen: EvaluatedStrategy, time_factor: float | None, choices: Choices
) -> tuple[Alternative, ...]:
    """Return every forecast strategy, the chosen first, by step time."""
    chosen_overrides = _overrides_of(chosen, chosen, search.job, choices)
    rows = []
    # the chosen forecast may be of compiled layers, while the search's is not
    searched_chosen = search.lookup(chosen.strategy)
    for candidate in (chosen if evaluated is searched_chosen else evaluated for evaluated in search.evaluated.values()):
        timing, overrides = search.timing(candidate.strategy), _overrides_of(candidate, chosen, search.job, choices)
        step_s, tokens_per_s = timing.corrected(time_factor)
        differing = {name: value for name, value in overrides.items() if chosen_overrides.get(name) != value}
        row = Alternative(
            plan=describe(candidate.strategy, search.job), chosen=candidate is chosen,
            peak_bytes=candidate.forecast.peak_bytes, peak_high_bytes=candidate.forecast.peak_high_bytes,
            step_s=step_s, tokens_per_s=tokens_per_s,
            verdict=verdict_of(candidate.forecast, search.budget_bytes, candidate.strategy.offload_target),
            overrides=as_overrides(overrides), differs=as_overrides(differing),
        )  # fmt: skip
        rows.append((not row.chosen, timing.step_s, row.overrides, row))
    return tuple(row for *_, row in sorted(rows, key=lambda entry: entry[:3]))


def _overrides_of(candidate: EvaluatedStrategy, chosen: EvaluatedStrategy, job: Job, choices: Choices) -> dict[str, Any]:
    # settings that reproduce the candidate, without those that do nothing in both plans
    values = candidate.strategy.settings(job.batch, job.world) | {"lora_r": candidate.rank}
    values["max_length"] = choices.value("max_length") if candidate.width == chosen.width else candidate.width
    if candidate.strategy.checkpointing is not True:
        del values["activation_checkpointing_every_n_layers"]
    if not (candidate.strategy.host_table or chosen.strategy.host_table):
        del values["offload_embeddings"]
    if not (candidate.strategy.offloaded or chosen.strategy.offloaded):
        del values["layer_offloading"]
    if not candidate.strategy.offloaded:
        del values["offloaded_layers"]
    return choices.only_auto(values)


def describe(strategy: Strategy, job: Job) -> str:
    """Summarise a strategy: `NF4, every layer recomputed, 2 x 8`."""
    steps = job.batch // (job.world * strategy.micro)
    optim = "" if OPTIMIZERS[strategy.optim].price == 1 else f", {strategy.optim}"
    embedding = ", input embedding offloaded" if strategy.host_table else ""
    layers = f", {strategy.offloaded} layers {OFFLOAD_LABELS[strategy.offload_target]}" if strategy.offload_target else ""
    return f"{strategy.base.label}, {strategy.checkpointing_summary}, {strategy.micro} x {steps}{optim}{embedding}{layers}"
