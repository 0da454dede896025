"""Plans the default configuration of every text-generating model type of transformers; prints what became of each.

    python benchmarks/model_types.py                     # the table with reasons; half an hour
    python benchmarks/model_types.py qwen3_5 gemma3      # only these types
    python benchmarks/model_types.py --full              # with all layers of the defaults, not at most four
    python benchmarks/model_types.py --write             # also writes benchmarks/reference/model_types.csv

Types are those of AutoModelForCausalLM and AutoModelForImageTextToText. Each is planned from a config.json for a card of
unlimited memory. Needs no GPU, no network and no weights.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FORECAST, REFUSED, ERROR = "forecast", "refused", "internal error"
TABLE = Path(__file__).parent / "reference" / "model_types.csv"
#: Layers of a model in the table: enough for the layers to differ or repeat.
LAYERS = 4
#: All that a plan would search for, so that a plan is one forecast.
SETTINGS = {
    "dataset": "rows.jsonl", "max_length": 64, "dtype": "bfloat16", "load_in_4bit": True, "packing": False, "lora_r": 8,
    "per_device_train_batch_size": 1, "effective_batch_size": 8, "activation_checkpointing": True, "optim": "adamw_torch",
    "target_modules": "all-linear",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of a model type: `result` is one of FORECAST, REFUSED and ERROR; `detail` the method or the reason."""

    kind: str
    result: str
    detail: str
    seconds: float = 0.0


def table() -> dict[str, tuple[str, str]]:
    """Model type -> result and detail, from the committed table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {row["model_type"]: (row["result"], row["detail"]) for row in csv.DictReader(file)}


def write_table(outcomes: list[Outcome]) -> None:
    """Write the committed table."""
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("model_type", "result", "detail"))
        writer.writerows((row.kind, row.result, row.detail) for row in sorted(outcomes, key=lambda row: row.kind))


def model_types() -> list[str]:
    """Every model type that transformers generates text with, as in a config.json."""
    from transformers.models.auto import modeling_auto

    return sorted({*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def default_values(kind: str, layers: int | None = None) -> dict[str, object]:
    """The content of a config.json with a type's default values, with at most so many layers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from finetune.memory.depth import at_depth
    from finetune.model.language_model import text_config

    config = CONFIG_MAPPING[kind]()
    if layers is not None and (getattr(text_config(config), "num_hidden_layers", None) or 0) > layers:
        config = at_depth(config, layers)
    return json.loads(config.to_json_string(use_diff=False))


def outcome_of(kind: str, layers: int | None = LAYERS) -> Outcome:
    """Plan one model type."""
    from finetune.errors import FinetuneError

    began = time.perf_counter()

    def outcome(result: str, detail: str) -> Outcome:
        return Outcome(
            kind,
            result,
            " ".join(re.sub(r"model_name_or_path \S+: ", "", detail).split()),
            round(time.perf_counter() - began, 1),
        )

    try:
        values = default_values(kind, layers)
    except Exception as error:  # noqa: BLE001 - some types have no default configuration
        return outcome(
            REFUSED, f"transformers has no default configuration of it: {type(error).__name__}: {error}".splitlines()[0]
        )
    try:
        plan = planned(values)
        return outcome(FORECAST, plan.forecast.method)
    except FinetuneError as error:
        return outcome(REFUSED, f"{'; '.join(error.problems)} ({error.fix})")
    except Exception as error:  # noqa: BLE001 - the table is about these
        stack = traceback.extract_tb(error.__traceback__)
        own = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in stack][-4:]
        return outcome(ERROR, f"{type(error).__name__}: {str(error)[:300]} at {' '.join(own)}".replace("\n", " "))


def planned(values: dict[str, object], **more: object):  # type: ignore[no-untyped-def]
    """The plan of a model with this config.json for a card of unlimited memory."""
    from finetune.card.card import Card
    from finetune.planner.planner import make_plan
    from finetune.recipe import recipe_from

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        recipe = recipe_from({**SETTINGS, "model_name_or_path": folder, **more})
        return make_plan(recipe, Card("a card", 2**44, 2**44, (8, 6), context_bytes=2**28), None)


def main() -> None:
    """Print the table, then the count of each result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    os.environ.setdefault("FINETUNE_CACHE", tempfile.mkdtemp())
    kinds = options.types or model_types()
    with ProcessPoolExecutor(options.processes) as pool:
        outcomes = []
        for outcome in pool.map(outcome_of, kinds, [None if options.full else LAYERS] * len(kinds)):
            outcomes.append(outcome)
            print(f"{outcome.kind:28} {outcome.result:10} {outcome.seconds:6.1f} s  {outcome.detail}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in Counter(outcome.result for outcome in outcomes).items()))
    if options.write:
        write_table(outcomes)


if __name__ == "__main__":
    main()
