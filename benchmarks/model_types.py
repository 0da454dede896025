"""Every text-generating model type of transformers: planned or refused, and whether a small model trains.

    python benchmarks/model_types.py                     # all types; half an hour
    python benchmarks/model_types.py qwen3_5 --write     # only this one; writes it to benchmarks/reference/model_types.csv
    python benchmarks/model_types.py --check             # names new types; fails where a type no longer trains or is planned

Covers the types of AutoModelForCausalLM and AutoModelForImageTextToText. The plan is for the default configuration with four
layers and a GPU of unlimited memory. The training is one step with LoRA in float32 on the CPU, of a model of
benchmarks/families.py or of a narrower default configuration. Needs no GPU, no network and no weights.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import tempfile
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import families
from finetune.errors import FinetuneError
from tables import REFERENCE, read_table, write_table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "model"))
from one_step import loss_falls  # noqa: E402 - of the tests

FORECAST, REFUSED, ERROR, YES = "forecast", "refused", "internal error", "yes"
TABLE = REFERENCE / "model_types.csv"
#: Layers of a model in the table: enough for the layers to differ or repeat.
LAYERS = 4
#: Bytes of a process, soft and hard: a default vision tower may have hundreds of billions of weights.
MEMORY = (2**33, 2**33)
#: All that a plan would search for, so that a plan is one forecast.
SETTINGS = {
    "dataset": "rows.jsonl", "max_length": 64, "dtype": "bfloat16", "load_in_4bit": True, "packing": False, "lora_r": 8,
    "per_device_train_batch_size": 1, "effective_batch_size": 8, "activation_checkpointing": True, "optim": "adamw_torch",
    "target_modules": "all-linear",
}  # fmt: skip
#: Fields of a configuration that are divided by one number, and the most that others may be.
_WIDTHS = re.compile(r"heads$|^n_head$|^hidden_size$|^d_model$|^n_embd$|^attention_hidden_size$")
_MOST = {
    r"vocab_size": 1024, r"token_(id|index)$": 1000, r"intermediate|ffn|ffw|mlp_hidden|d_ff": 256, r"experts$": 16,
    r"^(depth|(num_)?(hidden_)?layers)$": LAYERS,
}  # fmt: skip


def table() -> dict[str, dict[str, str]]:
    """Model type -> its row of the committed table. `detail`: the method or the reason. `trains`: YES, why not, or empty where
    the type is refused."""
    return {row["model_type"]: row for row in read_table(TABLE)}


def model_types() -> list[str]:
    """Every model type that transformers generates text with, as in a config.json."""
    from transformers.models.auto import modeling_auto

    return sorted({*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def default_values(kind: str) -> dict[str, Any]:
    """The content of a config.json with a type's default values and at most LAYERS layers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from finetune.memory.depth import at_depth
    from finetune.model.language_model import text_config

    config = CONFIG_MAPPING[kind]()
    if (getattr(text_config(config), "num_hidden_layers", None) or 0) > LAYERS:
        config = at_depth(config, LAYERS)
    text = config.to_json_string(use_diff=False)
    return json.loads(text, object_hook=lambda value: float(value["__float__"]) if "__float__" in value else value)


def narrower(values: dict[str, Any], divisor: int) -> dict[str, Any]:
    """These values with fewer heads, experts, tokens and features."""

    def small(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return narrower(value, divisor)
        if isinstance(value, list) and "layer" in name:
            return value[:LAYERS]
        if type(value) is not int:  # a bool stays, too
            return value
        if _WIDTHS.search(name):
            return max(1, value // divisor)
        return min([value, *(most for pattern, most in _MOST.items() if re.search(pattern, name))])

    return {name: small(name, value) for name, value in values.items()}


def planned_or_why(kind: str) -> tuple[str, str]:
    """The result of planning a type's default configuration, and the method of its forecast or the reason."""
    try:
        values = default_values(kind)
    except Exception as error:  # noqa: BLE001 - some types have no default configuration
        return REFUSED, f"transformers has no default configuration of it: {one_line(error)}"
    try:
        return FORECAST, planned(values).forecast.method
    except Exception as error:  # noqa: BLE001 - the table is about these
        return REFUSED if isinstance(error, FinetuneError) else ERROR, one_line(error)


def planned(values: dict[str, Any]) -> Any:
    """The plan of a model with this config.json for a card of unlimited memory."""
    from finetune.card.card import Card
    from finetune.planner.planner import make_plan
    from finetune.recipe import recipe_from

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        recipe = recipe_from({**SETTINGS, "model_name_or_path": folder})
        return make_plan(recipe, Card("a card", 2**44, 2**44, (8, 6), context_bytes=2**28), None)


def trained_or_why(kind: str) -> str:
    """YES, or why the narrowest small model of a type does not train."""
    reasons = []
    for divisor in (8, 4, 1):  # parts that divided sizes don't fit may fit whole ones
        try:
            loss_falls(families.config_values(kind) if kind in families.FAMILIES else narrower(default_values(kind), divisor))
            return YES
        except Exception as error:  # noqa: BLE001 - the table is about these
            reasons.append(one_line(error))
    return reasons[0]


def one_line(error: Exception) -> str:
    """An error without the folder of its model."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, FinetuneError):
        text = f"{'; '.join(error.problems)} ({error.fix})"
    return " ".join(re.sub(r"model_name_or_path \S+: ", "", text).split())


def outcome_of(kind: str) -> dict[str, str]:
    """Plan a type and train a small model."""
    result, detail = planned_or_why(kind)
    trains = trained_or_why(kind)
    trains = trains if trains == YES or result == FORECAST else ""
    return {"model_type": kind, "result": result, "detail": detail, "trains": trains}


def why_no_longer(row: dict[str, str]) -> str:
    """Why a type no longer trains or is no longer planned, as this row says; empty where it still is."""
    kind = row["model_type"]
    if row["trains"] == YES:
        reason = trained_or_why(kind)
        return "" if reason == YES else f"{kind} no longer trains: {reason}"
    result, detail = planned_or_why(kind)
    return "" if result == FORECAST else f"{kind} is no longer planned: {detail}"


def check(pool: Executor) -> int:
    """Print the types that the table lacks, and the types that no longer match it; returns 1 for the latter."""
    rows, installed = table(), model_types()
    print("never tried:", *[kind for kind in installed if kind not in rows])
    good = [row for kind, row in rows.items() if kind in installed and row["trains"]]
    reasons = [reason for reason in pool.map(why_no_longer, good) if reason]
    print(*reasons, sep="\n")
    return bool(reasons)


def main() -> int:
    """Print the rows of these types, or check the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("FINETUNE_CACHE", tempfile.mkdtemp())
    rows = {}
    with ProcessPoolExecutor(2, initializer=resource.setrlimit, initargs=(resource.RLIMIT_DATA, MEMORY)) as pool:
        if options.check:
            return check(pool)
        for row in pool.map(outcome_of, options.types or model_types()):
            rows[row["model_type"]] = row
            print(", ".join(row.values()))
    if options.write:
        write_table(TABLE, [row for _, row in sorted((table() | rows).items())])
    return 0


if __name__ == "__main__":
    sys.exit(main())
