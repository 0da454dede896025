"""The longest row of Llama-3.1-8B (QLoRA, rank 32, micro-batch 1) that fits each GPU by the upper end of the forecast.

    python benchmarks/longest_rows.py                  # GPUs of 8, 12, 16 and 24 GB; a few minutes, needs no GPU
    python benchmarks/longest_rows.py --host 32GiB     # free host memory for the layers' inputs
    python benchmarks/longest_rows.py rtx-4090 --without mlp_tile_tokens=0 offload_embeddings=false

Prints for each GPU the length, the pinned host memory, and the parts of the peak. Nothing is measured on a GPU.
"""

from __future__ import annotations

import argparse
from typing import Any

import yaml

from finetune.card import find_card
from finetune.planner.plan import Plan
from finetune.planner.planner import make_plan
from finetune.recipe import recipe_from
from finetune.units import GIB, parse_bytes

#: What was found last (docs/memory.md): where a search begins.
LAST_LENGTHS = {"rtx-4060": 47_104, "rtx-3060": 87_552, "rtx-4060-ti-16gb": 124_928, "rtx-4090": 208_384}
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
RECIPE: dict[str, Any] = {
    "model_name_or_path": MODEL, "dataset": "rows.jsonl", "load_in_4bit": True, "lora_r": 32, "packing": False,
    "per_device_train_batch_size": 1, "effective_batch_size": 16, "optim": "paged_adamw_8bit",
    "activation_checkpointing": "offload",
}  # fmt: skip
#: Lengths are found to this many tokens.
STEP = 256


def plan_for(card: str, tokens: int, changes: dict[str, Any]) -> Plan:
    """Return the plan for rows of this number of tokens."""
    return make_plan(recipe_from({**RECIPE, "max_length": tokens, **changes}), find_card(card), None)


def longest(card: str, changes: dict[str, Any], host_bytes: float = float("inf")) -> Plan | None:
    """Return the plan of the longest row that fits a host with this free memory; None if not even STEP tokens fit."""
    best, fits, over = None, 0, 2**20
    tokens = LAST_LENGTHS.get(card, 2**14)
    while over - fits > STEP:
        plan = plan_for(card, tokens, changes)
        if plan.verdict.fits and plan.forecast is not None and plan.forecast.host_bytes <= host_bytes:
            best, fits = plan, tokens
        else:
            over = tokens
        tokens = (fits + over) // 2 // STEP * STEP
    return best


def main() -> None:
    """Print a line for each GPU."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("cards", nargs="*", default=list(LAST_LENGTHS))
    arguments.add_argument("--without", nargs="*", default=[], metavar="SETTING=VALUE", help="settings to replace")
    arguments.add_argument("--host", type=parse_bytes, default=float("inf"), metavar="SIZE", help="free memory of the host")
    options = arguments.parse_args()
    changes = {name: yaml.safe_load(value) for name, _, value in (change.partition("=") for change in options.without)}
    for card in options.cards:
        plan = longest(card, changes, options.host)
        if plan is None or plan.forecast is None:
            print(f"{card:18} not even {STEP} tokens", flush=True)
            continue
        parts = sorted(plan.forecast.parts.items(), key=lambda part: -part[1])
        peak_parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts if size > GIB / 100)
        budget = (plan.budget_bytes or 0) / GIB
        table = "host" if plan.settings.offload_embeddings else "card"
        settings = f"tiles of {plan.settings.mlp_tile_tokens}, table on the {table}"
        print(
            f"{card:18} {plan.settings.max_length:8,} tokens; {settings};"
            f" pins {plan.forecast.pinned_bytes / GIB:.1f} GiB of host memory;"
            f" at most {plan.forecast.peak_high_bytes / GIB:.2f} of {budget:.2f} GiB; at the peak: {peak_parts}",
            flush=True,
        )


if __name__ == "__main__":
    main()
