"""Real training steps of real model sizes with random weights on any card: measured memory and speed beside the forecast.

    python benchmarks/gpu/train.py Qwen/Qwen2.5-7B-Instruct --length 2048 --steps 8 load_in_4bit=true lora_r=16
    python benchmarks/gpu/train.py tiny --length 128 --steps 4 gpu=cpu            # the same path without a card

Prints a table and, on a card, appends to benchmarks/results/gpu.jsonl.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from measure import append, environment, measure

from finetune.recipe import yaml
from finetune.units import format_bytes


def main() -> None:
    """Measure one shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "finetune-gpu")
    options = parser.parse_intermixed_args()
    settings = {key: yaml.parse_value(value) for key, _, value in (text.partition("=") for text in options.settings)}
    options.place.mkdir(parents=True, exist_ok=True)
    result = measure(options.shape, settings, length=options.length, steps=options.steps, place=options.place)
    facts = environment()
    if facts["card"]:
        append(result, facts)
    print_result(result)


def print_result(result: dict[str, Any]) -> None:
    """Print forecast, measurement and error."""
    print(f"{result['shape']} {result['settings']} length {result['length']}: {result['state']} {result.get('message') or ''}")
    forecast = result["forecast"] or {}
    for name, key, measured in (
        ("allocated", "allocated_bytes", "measured_allocated_bytes"),
        ("reserved", "reserved_bytes", "measured_reserved_bytes"),
        ("whole card", "peak_bytes", "measured_card_bytes"),
    ):
        said, was = forecast.get(key), result[measured]
        error = f"{said / was - 1:+.2%}" if said and was else "not measured"
        print(f"  {name:<10} forecast {format_bytes(said):>13}  measured {format_bytes(was):>13}  {error}")
    print(f"  step {result['step_s'] or 'not measured'} s, tokens/s {result['tokens_per_s'] or 'not measured'}")


if __name__ == "__main__":
    main()
