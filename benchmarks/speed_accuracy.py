"""Modelled tokens per second beside published ones.

    python benchmarks/speed_accuracy.py [CSV] [--rows] [--published-rates]

Reads `benchmarks/reference/published_speed.csv`: measurements that others published with their settings. Each row models the
measured program, which is not this project's trainer: rows with `fp32_rest` compute in fp32 outside the quantised layers
(`prepare_model_for_kbit_training`). Prints modelled / measured for each source and GPU, then for pairs of rows that differ in
one setting how often the model orders them as measured. `--published-rates` drops all fitted constants: every GPU reaches the
default shares of its published rates, and eager attention moves no more bytes than other kinds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")  # of the libraries that build the models
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from finetune.card.card import Card  # noqa: E402
from finetune.card.find import catalogue as gpus  # noqa: E402
from finetune.model.names import catalogue as models  # noqa: E402
from finetune.planner.shape import shape_of  # noqa: E402
from finetune.planner.speed import FP32_SHARE, Batches, Job, Timing, time_step  # noqa: E402
from finetune.planner.strategy import Strategy  # noqa: E402
from finetune.recipe import recipe_from  # noqa: E402
from finetune.settings.base_formats import BITS_16, NF4, BaseFormat  # noqa: E402
from tables import REFERENCE, read_table  # noqa: E402

#: Published fp32 rates without tensor cores in FLOP/s: torch computes fp32 matrix products so unless TF32 is switched on.
FP32_FLOPS = {"t4": 8.1e12, "a100-80gb": 19.5e12, "a100-40gb": 19.5e12}
#: Measurements that differ by less than this share have no order: repeated rows differ by as much.
NOISE = 0.15


@dataclass(frozen=True)
class Row:
    """A published measurement, with its other columns, and the model's value, in tokens per second."""

    columns: dict[str, str]
    gpu: str
    base: BaseFormat
    attention: str
    measured: float
    modelled: float
    parts: dict[str, float]

    @property
    def ratio(self) -> float:
        """Modelled / measured."""
        return self.modelled / self.measured


def main() -> int:
    """Print both tables; returns 0."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("csv", nargs="?", default=REFERENCE / "published_speed.csv", type=Path)
    arguments.add_argument("--rows", action="store_true", help="print each row, too")
    arguments.add_argument(
        "--published-rates", action="store_true", help="leave out the fitted shares and the term of eager attention"
    )
    options = arguments.parse_args()
    rows = read_rows(options.csv, options.published_rates)
    if options.rows:
        for row in rows:
            parts = " ".join(f"{name} {seconds:.2f}" for name, seconds in row.parts.items() if seconds > 0.005)
            model = row.columns["model"].partition("/")[2][:16]
            tokens = f"{row.columns['micro_batch']:>2} x {row.columns['tokens']:>5}"
            program = f"{row.attention[:5]:5} {row.measured:7,.0f} {row.columns['program'][:20]:20}"
            print(f"{row.ratio:5.2f} {row.gpu:9} {model:16} {row.base.label:6} {tokens} {program} {parts}")
    print("\n".join([*table(rows), "", *summary(rows)]))
    return 0


def table(rows: list[Row]) -> list[str]:
    """Lines of Markdown: modelled / measured of each source, GPU and format."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        kind = f"{row.base.label}{', eager attention' if row.attention == 'eager' else ''}"
        groups[row.columns["source"], row.gpu, kind].append(row.ratio)
    lines = ["| source | GPU | base | rows | median | worst |", "| --- | --- | --- | --: | --: | --: |"]
    lines += [
        f"| {source} | {gpu} | {kind} | {len(ratios)} | {statistics.median(ratios):.2f} | {worst(ratios):.2f} |"
        for (source, gpu, kind), ratios in sorted(groups.items())
    ]
    return lines


def summary(rows: list[Row]) -> list[str]:
    """Lines of text: the ratios of all rows, and the share of pairs in the measured order."""
    ratios = sorted(row.ratio for row in rows)
    quarter = len(ratios) // 4
    ordered = [in_order(*pair) for pair in pairs(rows)]
    return [
        f"{len(rows)} rows: median {statistics.median(ratios):.2f}, half of them from {ratios[quarter]:.2f} to "
        f"{ratios[-quarter - 1]:.2f}, worst {worst(ratios):.2f}.",
        f"Pairs that differ in one setting and by over {NOISE:.0%}: {sum(ordered)} of {len(ordered)} in the measured order.",
    ]


def worst(ratios: list[float]) -> float:
    """The ratio farthest from 1, either way."""
    return max(ratios, key=lambda ratio: abs(math.log(ratio)))


def pairs(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Rows of one source, GPU and model that differ in the format, the attention or the micro-batch, and by more than noise."""
    for first, second in itertools.combinations(rows, 2):
        other = {name for name in first.columns if first.columns[name] != second.columns[name]}
        differing = other & {"base", "attention", "micro_batch"}
        alike = not other & {"source", "card", "model", "tokens", "compiled"}
        if alike and len(differing) == 1 and abs(math.log(first.measured / second.measured)) > math.log1p(NOISE):
            yield first, second


def in_order(first: Row, second: Row) -> bool:
    """Whether the model, too, has the faster of two rows as the faster one; equal is wrong."""
    return (first.measured - second.measured) * (first.modelled - second.modelled) > 0


def read_rows(path: Path, published_rates: bool = False) -> list[Row]:
    """Return the published measurements with modelled values; `published_rates` leaves out fitted constants."""
    return [_row(values, published_rates) for values in read_table(path)]


def _row(values: dict[str, str], published_rates: bool) -> Row:
    base = NF4 if values["base"] == "NF4" else BITS_16
    tokens, micro = int(values["tokens"]), int(values["micro_batch"])
    timing = _timing(values, base, tokens, micro, published_rates)
    measured, modelled = float(values["tokens_per_s"]), micro * tokens / timing.step_s
    return Row(values, values["card"], base, values["attention"], measured, modelled, timing.parts)


def _timing(values: dict[str, str], base: BaseFormat, tokens: int, micro: int, published_rates: bool) -> Timing:
    own = json.loads((REFERENCE / "model_configs.json").read_text(encoding="utf-8"))
    config: dict[str, Any] = own.get(values["model"]) or models()[values["model"]]
    recipe = recipe_from(
        {"model_name_or_path": values["model"], "dataset": "none", "target_modules": values["targets"].split()}
    )
    job = Job(
        shape=shape_of(config, recipe), card=gpus()[values["card"]], batches=Batches(tokens, False, None), batch=micro, world=1,
        rank=int(values["rank"]), compiled=values["compiled"] == "yes", attention=values["attention"],
    )  # fmt: skip
    if published_rates:
        card = dataclasses.replace(job.card, flops_share=Card.flops_share, bandwidth_share=Card.bandwidth_share)
        job = dataclasses.replace(job, card=card, attention="sdpa")
    timing = time_step(job, Strategy(base, values["checkpointing"] == "yes", 1, "adamw_torch", micro))
    if values["fp32_rest"] != "yes":
        return timing
    parts = dict(timing.parts)
    parts["loss"] *= (job.card.bf16_flops or 0) * job.card.flops_share / (FP32_FLOPS[values["card"]] * FP32_SHARE)
    parts["elementwise"] *= 2
    return Timing(sum(parts.values()), 0.0, parts)


if __name__ == "__main__":
    sys.exit(main())
