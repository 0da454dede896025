"""Parts of a GPU's memory in a forecast, by phase."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.planner.plan import Plan
from finetune.units import format_bytes, gib

from ..language import mark, tr
from .words import precision, rows

#: Parts that adapter training keeps.
_STATES = {"adapters": mark("adapters {size}"), "gradients": mark("gradients {size}"), "optimizer": mark("optimizer {size}")}


@dataclass(frozen=True)
class Part:
    """Part of the GPU's memory, with an explanation."""

    key: str
    name: str
    size: int
    why: str


def parts_of(plan: Plan) -> tuple[list[Part], int]:
    """Return the parts while training, which sum to the GPU's memory, and the excess bytes."""
    forecast, card = plan.forecast, plan.card
    assert forecast is not None
    budget = min(plan.usable_bytes, card.total_bytes)
    owner = tr("Libraries of the process" if card.is_cpu else "CUDA and allocator")
    whose = tr(
        "Memory of Python and its libraries, and memory that the allocator holds but can't use." if card.is_cpu
        else "The CUDA context, and memory that the allocator holds but can't use."
    )  # fmt: skip
    spread = tr("Margin above the forecast. The plan must fit with the whole margin.")
    parts = [
        *_training(plan),
        Part("overhead", owner, max(0, forecast.peak_bytes - forecast.allocated_bytes), whose),
        Part("spread", tr("Margin"), max(0, forecast.peak_high_bytes - forecast.peak_bytes), spread),
    ]
    used, others = sum(part.size for part in parts), card.total_bytes - budget
    is_assumed = card.source == "catalogue"
    why = tr(
        "{size}, assumed for a desktop." if is_assumed else "{size} in use now or outside the memory budget.",
        size=gib(others),
    )
    parts.append(Part("free", tr("Free"), max(0, budget - used), tr("Free memory if the whole margin is needed.")))
    parts.append(Part("held", tr("Other programs"), others, why))
    return [part for part in parts if part.size > 0 or part.key == "free"], max(0, used - budget)


def _training(plan: Plan) -> list[Part]:
    forecast, settings = plan.forecast, plan.settings
    assert forecast is not None
    sizes = forecast.parts
    state = {name: sizes.get(name, 0) for name in _STATES}
    detail = tr(", ").join(tr(_STATES[name], size=format_bytes(size)) for name, size in state.items())
    activations = tr(
        "Kept by {layers} layers for the backward pass of {rows} of up to {tokens} tokens.",
        layers=forecast.layers, rows=rows(settings.per_device_train_batch_size),
        tokens=f"{settings.max_length:,}",
    )  # fmt: skip
    base = tr("The frozen base model, {precision}.", precision=precision(settings))
    loss = sizes.get("loss", 0) + sizes.get("workspace", 0)
    return [
        Part("weights", tr("Model weights"), sizes.get("weights", 0), base),
        Part(
            "gathered", tr("Gathered weights"), sizes.get("gathered", 0), tr("Weights of other GPUs, gathered for a layer.")
        ),
        Part(
            "adapters", tr("Adapter training"), sum(state.values()),
            tr("Rank {rank}: {parts}.", rank=settings.lora_r, parts=detail),
        ),
        Part("activations", tr("Activations"), sizes.get("activations", 0) + sizes.get("recomputed", 0), activations),
        Part("loss", tr("Loss and workspace"), loss, tr("Logits and scratch memory of kernels.")),
    ]  # fmt: skip
