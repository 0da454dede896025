"""Trains a small model of each family on the CPU, in 16 and in 4 bit, and compares its memory with the forecast.

    python benchmarks/families.py                  # every family: the worst phase of each, and the losses; minutes
    python benchmarks/families.py gemma3 qwen3_5   # only these
    python benchmarks/families.py --write          # also writes benchmarks/reference/families.csv

A family is a model type: all types of the packaged catalogue, and others that people train. The models have random weights and
the traits of real models: layer patterns, soft caps, sinks, shared keys and values, experts, parts for images. The run is the
worker's own, with every storage tracked; the forecast is the dry run of the same plan. Needs no GPU and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tables import REFERENCE, write_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "memory"))  # real_run
TABLE = REFERENCE / "families.csv"
BITS = (16, 4)
#: Tokens of the one row that is repeated; the phases of a run.
TOKENS = 128
PHASES = ("load", "forward", "loss", "loss backward", "backward", "optimizer", "save", "eval")

_VALUES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
#: Parts that families have in common, by name.
SHARED: dict[str, dict[str, Any]] = _VALUES["shared"]
#: Model type -> what its config.json has beside the sizes; with a `text_config` it is all that config.json has.
FAMILIES: dict[str, dict[str, Any]] = _VALUES["families"]


def config_values(family: str) -> dict[str, Any]:
    """The content of a small model's config.json."""
    traits = FAMILIES[family]
    values = {**({} if "text_config" in traits else SHARED["sizes"]), **traits}
    return {"model_type": family, **{name: value for name, value in values.items() if value is not None}}


def save_model(family: str, folder: Path) -> str:
    """Save a small model of this family, with random weights and the bundled model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    values = config_values(family)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    whole = AutoModelForImageTextToText if "text_config" in values else AutoModelForCausalLM
    whole.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    bundled_tokenizer().save_pretrained(folder)
    return str(folder)


def bundled_tokenizer() -> Any:
    """The tokenizer of the bundled model: bytes and frequent pairs."""
    from transformers import AutoTokenizer

    from finetune.bundled import model_path

    return AutoTokenizer.from_pretrained(model_path("tiny"))


def trained(family: str, bits: int, folder: Path, **more: Any) -> tuple[dict[str, int], dict[str, int], list[float]]:
    """Peak bytes of each phase as forecast and as tracked, and the loss of each step, of three steps on one repeated row."""
    from real_run import forecast, measured, planned

    from finetune.events import read_events
    from finetune.model.configuration import default_attention

    row = folder / "row.jsonl"
    row.write_text(json.dumps({"text": _text_of(TOKENS - 1)}) + "\n", encoding="utf-8")
    run, plan = planned(
        save_model(family, folder / "model"), folder,
        **{
            "dataset": {"path": str(row), "eval_path": str(row)}, "load_in_4bit": bits == 4, "max_steps": 3, "save_steps": 3,
            "eval_steps": 3, "gradient_accumulation_steps": 1, "learning_rate": 3e-3, "lr_scheduler_type": "constant",
            "warmup_ratio": 0, "attn_implementation": default_attention(config_values(family)), **more,
        },
    )  # fmt: skip
    expected, seen = forecast(plan), measured(run)
    return expected, seen, [event.loss for event in read_events(run.events) if event.kind == "step"]


@cache
def _text_of(tokens: int) -> str:
    """Return a text of this number of tokens, without EOS."""
    tokenizer, text = bundled_tokenizer(), " ".join(map(str, range(tokens)))
    return next(text[:end] for end in range(tokens, len(text)) if len(tokenizer(text[:end]).input_ids) == tokens)


def row_of(family: str, bits: int) -> dict[str, str]:
    """Train one family: the loss before the first and after the last step, and the phase whose peak is furthest from its
    forecast, relative."""
    with tempfile.TemporaryDirectory() as folder:
        expected, seen, losses = trained(family, bits, Path(folder))
    errors = {phase: expected[phase] / seen[phase] - 1 for phase in PHASES}
    worst = max(errors, key=lambda phase: abs(errors[phase]))
    return {
        "family": family, "bits": str(bits), "first_loss": f"{losses[0]:.3f}", "last_loss": f"{losses[-1]:.3f}",
        "worst_phase": worst, "worst_error": f"{errors[worst]:.5f}",
    }  # fmt: skip


def main() -> None:
    """Print a line for each family and bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("FINETUNE_CACHE", tempfile.mkdtemp())
    cases = [(family, bits) for family in options.families or sorted(FAMILIES) for bits in BITS]
    rows = []
    with ProcessPoolExecutor(2) as pool:
        for row in pool.map(row_of, *zip(*cases, strict=True)):
            rows.append(row)
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if options.write:
        write_table(TABLE, rows)


if __name__ == "__main__":
    main()
