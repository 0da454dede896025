"""The last bytes of a stand-in GPU: which budgets a run fits, and how retries finish a run on a smaller GPU.

    .venv-card-*/bin/python -m benchmarks.card_end [--only TEXT ...] [--steps 2] [--again]

"upper end", "likely peak", "lower end": budgets in steps of 2 MiB around these values of the forecast. At the first two the run
must finish, at the third it must run out of memory. "smaller by 20 %": the run is planned for the whole GPU, then starts with
20 % less than the forecast's peak; the supervisor's retries must finish it. Results go to benchmarks/reference/card_end.csv.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import card_runs
from benchmarks.card_cells import FORMATS, Cell
from benchmarks.card_edge import GIB, run_within
from benchmarks.card_runs import GPU, Lines
from benchmarks.forks import import_worker
from benchmarks.tables import read_table
from standin_gpu.machine import Machine

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


def run_beside(base_format: str, end: str, offset_mib: int, machine: Machine) -> dict[str, Any]:
    """Run with a budget at an offset from an end of the forecast."""
    budget_of = functools.partial(budget_at, end=end, offset_bytes=offset_mib * MIB)
    line = run_within(cell_with(base_format), machine, budget_of)
    return {"gpu_bytes": line.get("budget_bytes"), "verdict": line.get("verdict"), "outcome": line["outcome"]}


def run_on_smaller(base_format: str, lacking: float, machine: Machine) -> dict[str, Any]:
    """Plan for the whole GPU, then run where a share of the forecast's peak is missing."""
    # the planner's to choose, so that retries may change them
    chosen = dict.fromkeys(("activation_checkpointing", "layer_offloading", "offload_embeddings"))
    cell = cell_with(base_format, per_device_train_batch_size=8, **chosen)
    with tempfile.TemporaryDirectory(dir=machine.folder) as folder:
        run = Path(folder) / "run"
        with card_runs.on_machine(machine):
            if why := card_runs.create_in_fork(cell, machine.folder, Path(folder)):
                return {"outcome": why}
        forecast = json.loads((run / "plan.json").read_text(encoding="utf-8"))["forecast"]
        total_bytes = (1 - lacking) * forecast["peak_bytes"]
        # described in a folder of its own: the next case is planned for the whole GPU
        with card_runs.on_machine(card_runs.machine_with(f"{GPU}:total_gib={total_bytes / GIB}", Path(folder))):
            status = card_runs.supervised(Path(folder))
        events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    changes = json.dumps([event["changes"] for event in events if event["kind"] == "retry"])
    return {"gpu_bytes": round(total_bytes), "outcome": f"exit {status}" if status else "finished", "changes": changes}


def all_cases(steps: int) -> dict[str, Callable[[Machine], dict[str, Any]]]:
    """Each case by its name, without its machine."""
    cases: dict[str, Callable[[Machine], dict[str, Any]]] = {}
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
        machine = card_runs.machine_with(GPU, Path(folder))
        with card_runs.on_machine(machine):
            import_worker()
        cases = {name: functools.partial(line_of, name, run, machine) for name, run in all_cases(options.steps).items()}
        card_runs.run_missing(cases, options, COLUMNS, name_of)
    lines = read_table(options.output)
    wrong = [name_of(line) for line in lines if not is_right(line)]
    print(f"{len(lines)} cases, {len(wrong)} did not end as they must" + "".join(f"\n  {name}" for name in wrong))
    return 1 if wrong else 0


def line_of(name: str, run: Callable[[Machine], dict[str, Any]], machine: Machine) -> Lines:
    """The line of a case."""
    base_format, case = name.split(" | ")
    return [{"case": case, "base_format": base_format, **run(machine)}]


def is_right(line: Mapping[str, Any]) -> bool:
    """Whether a case ended as it must: out of memory at the lower end, finished elsewhere."""
    return bool(line["outcome"] == ("out of memory" if line["case"].startswith("lower end") else "finished"))


def name_of(line: Mapping[str, Any]) -> str:
    """The name of a line's case."""
    return f"{line['base_format']} | {line['case']}"


if __name__ == "__main__":
    sys.exit(main())
