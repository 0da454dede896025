"""Plans cells and makes their run directories, before any of them runs: `python -m benchmarks.gpu.plans WISHES.json`.

Prints a JSON line for each cell: its run directory, forecast and FLOPs a token, or the error.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.planner.plan import Plan
    from finetune.planner.shape import ModelShape


def plan_cell(wish: dict[str, Any]) -> dict[str, Any]:
    """Plan one cell; `cap` of the wish makes the budget from the forecast without one."""
    from finetune.recipe import recipe_from
    from finetune.run.prepare import create_run, prepare

    values = wish["recipe"]
    prepared = prepare(recipe_from(values), force=True)
    forecast, budget = prepared.plan.forecast, None
    if wish["cap"] and forecast is not None:
        name, factor = wish["cap"]
        budget = int(getattr(forecast, name) * factor)
        prepared = prepare(recipe_from({**values, "memory_budget": str(budget)}), force=True)
    run = create_run(prepared)
    plan = prepared.plan
    return {
        "run": str(run.path), "forecast": plan.as_json()["forecast"], "verdict": str(plan.verdict), "budget_bytes": budget,
        "flops_per_token": _flops_per_token(plan), "bf16_flops": plan.card.bf16_flops,
        "context_bytes": plan.card.context_bytes, "settings": plan.as_json()["plan"],
    }  # fmt: skip


def _flops_per_token(plan: Plan) -> float:
    """Model FLOPs of a training step by real token: nothing recomputed, and no gradient of frozen weights.

    A frozen weight costs 4 (forward, gradient of its input), an adapter's 6; causal attention 2 x layers x width x length
    forward and 2.5 times that backward.
    """
    from finetune.model.configuration import read_config
    from finetune.planner.shape import shape_of

    settings, data = plan.settings, plan.data
    shape: ModelShape = shape_of(dict(read_config(settings)), settings)
    mean = sum(length * length for length in data.lengths) / max(1, data.total_tokens) if data else settings.max_length
    attention = 3.5 * 2 * shape.layers * shape.attention_width * mean
    return 4 * (shape.computed + shape.head) + 6 * settings.lora_r * shape.adapter_per_rank + attention


def main() -> None:
    """Plan every cell of the file; a failure does not stop the rest."""
    for wish in json.loads(Path(sys.argv[1]).read_text()):
        try:
            plan = plan_cell(wish)
        except Exception as error:  # noqa: BLE001 - recorded with its cell
            traceback.print_exc()
            plan = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"cell": wish["cell"], **plan}), flush=True)


if __name__ == "__main__":
    main()
