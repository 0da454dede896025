"""The last bytes of a stand-in GPU: which budgets a run fits, and how retries finish a run on a smaller GPU.

    .venv-card-*/bin/python -m benchmarks.card_end [--only TEXT ...] [--steps 2] [--again]

"upper end", "likely peak", "lower end": budgets in steps of 2 MiB around these values of the forecast. At the first two the run
must finish, at the third it must run out of memory. "smaller by 20 %": the run is planned for the whole GPU, then starts with
20 % less than the forecast's peak; the supervisor's retries must finish it. Results go to benchmarks/reference/card_end.csv.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import card_runs
from benchmarks.card_cells import FORMATS, Cell
from benchmarks.card_edge import run_within
from benchmarks.card_runs import GIB, GPU, Lines
from benchmarks.tables import read_table
from finetune.card.visible import environment_with_gpus
from finetune.events import Retry, read_events

if TYPE_CHECKING:
    from finetune.memory.forecast import Forecast

COLUMNS = ("case", "base_format", "gpu_bytes", "verdict", "outcome", "changes", "seconds")
MIB = 1 << 20
MODEL, LAYERS = "Qwen/Qwen3-8B", 4
ENDS = {"upper end": "peak_high_bytes", "likely peak": "peak_bytes", "lower end": "peak_low_bytes"}
#: Shares of the forecast's peak that a GPU lacks.
LACKING = (0.01, 0.05, 0.2, 0.5)


def cell_with(base_format: str, **settings: Any) -> Cell:
    """A run of four layers of an 8B model; the planner chooses settings of None."""
    values = {"max_steps": 4, "effective_batch_size": 8, **FORMATS[base_format], **settings}
    return Cell(MODEL, GPU, base_format, "nothing recomputed", settings=values, layers=LAYERS)


def budget_at(forecast: Forecast, end: str, offset_bytes: int) -> float:
    """Return the bytes at an offset from an end of the forecast."""
    return getattr(forecast, ENDS[end]) + offset_bytes


def run_beside(base_format: str, end: str, offset_mib: int, folder: Path) -> dict[str, Any]:
    """Run with a budget at an offset from an end of the forecast."""
    budget_of = functools.partial(budget_at, end=end, offset_bytes=offset_mib * MIB)
    line = run_within(cell_with(base_format), folder, budget_of)
    return {"gpu_bytes": line.get("budget_bytes"), "verdict": line.get("verdict"), "outcome": line["outcome"]}


def run_on_smaller(base_format: str, lacking: float, folder: Path) -> dict[str, Any]:
    """Plan for the whole GPU, then run where a share of the forecast's peak is missing."""
    # the planner's to choose, so that retries may change them
    chosen = dict.fromkeys(("activation_checkpointing", "layer_offloading", "offload_embeddings"))
    cell = cell_with(base_format, per_device_train_batch_size=8, **chosen)
    with card_runs.created(cell, folder) as (plan, run), tempfile.TemporaryDirectory(dir=folder) as smaller:
        total_bytes = (1 - lacking) * plan.forecast.peak_bytes
        with card_runs.on_machine(card_runs.machine_with(f"{GPU}:total_gib={total_bytes / GIB}", Path(smaller))):
            # speeds here are not those of the next case
            environment = {**environment_with_gpus(), "FINETUNE_CACHE": f"{smaller}/cache"}
            command = [sys.executable, "-m", "finetune.run.supervise", str(run.path)]
            status = subprocess.run(command, env=environment, check=False).returncode
        changes = json.dumps([event.changes for event in read_events(run.events) if isinstance(event, Retry)])
    return {"gpu_bytes": round(total_bytes), "outcome": f"exit {status}" if status else "finished", "changes": changes}


def all_cases(steps: int) -> dict[str, Callable[[Path], dict[str, Any]]]:
    """Each case by its name, without its folder."""
    cases: dict[str, Callable[[Path], dict[str, Any]]] = {}
    for base_format in FORMATS:
        for end in ENDS:
            for offset in range(-2 * steps, 2 * steps + 1, 2):
                cases[f"{base_format} | {end} {offset:+d} MiB"] = functools.partial(run_beside, base_format, end, offset)
        for lacking in LACKING:
            cases[f"{base_format} | smaller by {lacking:.0%}"] = functools.partial(run_on_smaller, base_format, lacking)
    return cases


def main() -> int:
    """Run the missing cases; returns 1 if a case did not end as it must."""
    parser = card_runs.parser_of(__doc__, "card_end.csv")
    parser.add_argument("--steps", type=int, default=2, help="budgets on each side of an end, 2 MiB apart")
    options = parser.parse_args()
    card_runs.restart_with_libraries("benchmarks.card_end")
    with tempfile.TemporaryDirectory(prefix="card_end_") as folder:
        cases = {name: functools.partial(line_of, name, run, Path(folder)) for name, run in all_cases(options.steps).items()}
        card_runs.run_missing(cases, options, COLUMNS, name_of)
    lines = read_table(options.output)
    wrong = [name_of(line) for line in lines if not is_right(line)]
    print(f"{len(lines)} cases, {len(wrong)} did not end as they must" + "".join(f"\n  {name}" for name in wrong))
    return 1 if wrong else 0


def line_of(name: str, run: Callable[[Path], dict[str, Any]], folder: Path) -> Lines:
    """The line of a case."""
    base_format, case = name.split(" | ")
    return [{"case": case, "base_format": base_format, **run(folder)}]


def is_right(line: Mapping[str, Any]) -> bool:
    """Whether a case ended as it must: out of memory at the lower end, finished elsewhere."""
    return bool(line["outcome"] == ("out of memory" if line["case"].startswith("lower end") else "finished"))


def name_of(line: Mapping[str, Any]) -> str:
    """The name of a line's case."""
    return f"{line['base_format']} | {line['case']}"


if __name__ == "__main__":
    sys.exit(main())
