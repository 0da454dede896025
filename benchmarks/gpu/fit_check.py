"""Forecast against a real card: plans and runs a grid of model shapes under memory caps that emulate smaller cards.

    python benchmarks/gpu/fit_check.py --minutes 9              # the most informative cells first; stops in time
    python benchmarks/gpu/fit_check.py --minutes 60 --bisect    # also finds the smallest cap with which each cell completes

Appends each finished cell to benchmarks/results/gpu.jsonl (card, driver, versions) and prints a table at the end. Only what ran
is written. Targets: allocated within 2 %, reserved within +5 %, no cell forecast as "fits" that ran out of memory.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import append, environment, measure

from finetune.units import GIB, format_bytes

#: Model shape, and the cap in GiB at which its verdict is least certain.
SHAPES = [
    ("meta-llama/Llama-3.2-1B-Instruct", 8), ("Qwen/Qwen2.5-7B-Instruct", 12), ("meta-llama/Llama-3.1-8B-Instruct", 24),
    ("meta-llama/Llama-3.2-3B-Instruct", 16), ("Qwen/Qwen3-14B", 24),
]  # fmt: skip
METHODS = [{"load_in_4bit": True}, {"load_in_4bit": False, "load_in_8bit": False}]
CHECKPOINTING = [True, False]
LENGTHS = [2048, 512, 8192]


def main() -> None:
    """Run the cells, the most informative first, until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--bisect", action="store_true")
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "finetune-gpu")
    options = parser.parse_args()
    facts = environment()
    if not facts["card"]:
        raise SystemExit("There is no NVIDIA card here; nothing was measured.")
    options.place.mkdir(parents=True, exist_ok=True)
    end, rows = time.monotonic() + 60 * options.minutes, []
    for length, method, checkpointing, (shape, cap_gib) in itertools.product(LENGTHS, METHODS, CHECKPOINTING, SHAPES):
        if time.monotonic() > end:
            break
        settings = {**method, "activation_checkpointing": checkpointing, "per_device_train_batch_size": 1, "lora_r": 16}
        result = measure(shape, settings, length=length, steps=options.steps, place=options.place, cap_bytes=cap_gib * GIB)
        if options.bisect and result["state"] == "finished":
            result["smallest_cap_bytes"] = smallest_cap(shape, settings, length, options, result)
        append(result, facts)
        rows.append(result)
        print(line(result), flush=True)
    print_table(rows)


def smallest_cap(shape: str, settings: dict[str, Any], length: int, options: Any, known: dict[str, Any]) -> int:
    """The smallest memory cap, to 128 MiB, with which the run completes."""
    low, high = known["measured_allocated_bytes"], known["cap_bytes"]
    while high - low > 128 * 2**20:
        middle = (low + high) // 2
        attempt = measure(shape, settings, length=length, steps=2, place=options.place, cap_bytes=middle)
        low, high = (low, middle) if attempt["state"] == "finished" else (middle, high)
    return high


def line(result: dict[str, Any]) -> str:
    """A cell as one line of text."""
    forecast, was = result["forecast"] or {}, result["measured_allocated_bytes"]
    said = forecast.get("allocated_bytes")
    error = f"{said / was - 1:+.2%}" if said and was else "not measured"
    return (
        f"{result['shape']:<36} {result['length']:>5} {'nf4' if result['settings'].get('load_in_4bit') else '16bit':<6}"
        f"{'recompute' if result['settings']['activation_checkpointing'] else 'keep':<10}"
        f"{result['verdict'] or '-':<13}{result['state'] or 'failed':<10}"
        f"{format_bytes(said):>12} {format_bytes(was):>13} {error:>12} {format_bytes(result['measured_reserved_bytes']):>13}"
    )


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print all cells, then the figures that have targets."""
    print("\nshape, tokens, weights, activations, verdict, ended, forecast, allocated, error, reserved")
    for row in rows:
        print(line(row))
    pairs = [
        (row["forecast"]["allocated_bytes"], row["measured_allocated_bytes"]) for row in rows if row["measured_allocated_bytes"]
    ]
    errors = [abs(said / was - 1) for said, was in pairs]
    if errors:
        print(f"{len(errors)} cells: mean |error| {sum(errors) / len(errors):.2%}, worst {max(errors):.2%} of allocated")
    false_fits = [row for row in rows if row["verdict"] == "fits" and row["state"] != "finished"]
    false_refusals = [row for row in rows if row["verdict"] == "does not fit" and row["state"] == "finished"]
    print(f"false 'fits': {len(false_fits)}; false 'does not fit': {len(false_refusals)} of {len(rows)}")


if __name__ == "__main__":
    main()
