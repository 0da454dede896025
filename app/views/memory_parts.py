"""Parts of a GPU's memory in a forecast while training."""

from __future__ import annotations

from finetune.planner.plan import Plan


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
