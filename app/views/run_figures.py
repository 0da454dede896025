"""Figures, memory and settings of a run or plan as HTML, measured beside forecast."""

from __future__ import annotations

import math

from finetune.events import Evaluation
from finetune.planner.plan import AS_SET, Plan

from ..language import mark, tr
from ..live import Digest
from .markup import Safe, as_on_page, render
from .run import measured_peak
from .series import smoothed

_SMOOTHING = 0.8
#: Phases by their name in the events.
_PHASES = {"load": mark("Loading"), "train": mark("Training"), "evaluate": mark("Evaluating"), "save": mark("Saving")}
#: Parts of New run's bar that training does not take.
_NOT_TAKEN = ("spread", "free", "held")


def figures(digest: Digest, plan: Plan) -> str:
    """Return loss, held-out loss, peak, speed and GPU, each beside a reference."""
    loss, held_out = digest.series.get("loss"), digest.series.get("eval_loss")
    # the newest step may have no value
    smooth = smoothed(loss.points(), _SMOOTHING) if loss else []
    evaluation, step = digest.newest.get(Evaluation.kind), digest.newest_step
    rate = step.tokens_per_s if step else None
    clauses, values = digest.pace.step_time(plan)
    return render(
        "figures", loss=loss, average=next((value for _, value in reversed(smooth) if value is not None), None),
        held_out=held_out if held_out and held_out.last is not None else None,
        held_out_step=evaluation.step if isinstance(evaluation, Evaluation) else held_out and held_out.last_step,
        lowest=min(((part.low, part.low_step) for part in held_out.bins.values() if part.count), default=None)
        if held_out else None,
        measured=measured_peak(digest, plan)[1], forecast=plan.forecast, is_cpu=plan.card.is_cpu, step=step,
        rate=rate if rate is not None and math.isfinite(rate) else None, percent=_percent,
        step_time=as_on_page(" ".join(tr(clause, **values) for clause in clauses)),
    )  # fmt: skip


def _percent(measured: float, forecast: float) -> str:
    off = round(100 * (measured / forecast - 1), 1)
    return f"{'−' if off < 0 else '+' if off else ''}{abs(off):.1f} %"


def memory(digest: Digest, plan: Plan) -> str:
    """Return the measured memory beside the forecast, by phase and part."""
    forecast, measured = plan.forecast, measured_peak(digest, plan)[1]
    # name, forecast and measured bytes; None if unknown
    pairs = [(tr("Process"), forecast.peak_bytes if forecast else None, measured)]
    if not plan.card.is_cpu:
        pairs += [
            (tr(name), forecast.of_phase(phase).allocated_bytes if forecast else None, digest.phases[phase])
            for phase, name in _PHASES.items() if phase in digest.phases
        ]  # fmt: skip
    pairs = [pair for pair in pairs if pair[1:] != (None, None)]
    # 6 % of space right of the longest bar
    scale = 1.06 * max([1, *(size or 0 for pair in pairs for size in pair[1:])])
    parts = {name: size for name, size in parts_of(plan)[0].items() if name not in _NOT_TAKEN} if forecast else {}
    return render(
        "memory", plan=plan, measured=measured, pairs=pairs, parts=parts, share=lambda size: f"{100 * size / scale:.2f}%",
        percent=_percent,
    )  # fmt: skip


def parts_of(plan: Plan) -> tuple[dict[str, int], int]:
    """Return the bytes of the parts, which sum to the GPU's memory, and the excess bytes; memory_parts.html names the parts."""
    forecast, total = plan.forecast, plan.card.total_bytes
    assert forecast is not None

    def of(*names: str) -> int:
        return sum(forecast.parts.get(name, 0) for name in names)

    parts = {
        "weights": of("weights"), "gathered": of("gathered"), "adapters": of("adapters", "gradients", "optimizer"),
        "activations": of("activations", "recomputed"), "loss": of("loss", "workspace"),
        # the CUDA context, and memory that the allocator holds
        "overhead": max(0, forecast.peak_bytes - forecast.allocated_bytes),
        # the plan must fit with the whole margin
        "spread": max(0, forecast.peak_high_bytes - forecast.peak_bytes),
    }  # fmt: skip
    used, budget = sum(parts.values()), min(plan.usable_bytes, total)
    parts |= {"free": max(0, budget - used), "held": total - budget}
    return {key: size for key, size in parts.items() if size > 0}, max(0, used - budget)


def chosen(plan: Plan) -> Safe:
    """Return six settings with their reasons, then all settings."""
    return render("choices", plan=plan, settings=plan.settings, as_set=AS_SET)
