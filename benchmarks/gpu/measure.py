"""Real runs on one GPU beside their forecasts, in less than ten minutes: see README.md in this folder.

    python -m benchmarks.gpu.measure                                       # this machine's GPU
    python -m benchmarks.gpu.measure --gpu cpu --model tiny                # the same without a GPU, in a minute or two

A cell's line is written as soon as the cell ends. The line of a failed cell, or of a cell without time left, has the error, and
the next cell runs. Runs have no supervisor, so nothing is retried.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.cells import CELLS, COMMON, OUT_OF_MEMORY, Cell
from benchmarks.gpu.random_model import write_rows
from benchmarks.gpu.results import Results, of_events
from finetune.card import nvidia
from finetune.card.visible import usable_devices
from finetune.events import read_events
from finetune.planner.plan import read_plan
from finetune.run.card import cards_of
from finetune.run.directory import RunDirectory
from finetune.run.supervise import worker_environment
from finetune.units import GIB, MIB

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "reference" / "gpu_results.jsonl"
NEEDS_CARD = "needs a card"
#: A cell is not begun with less than this left, and is ended after that much.
LEAST_S, MOST_S = 20, 150
#: Seconds between samples of the cards' memory.
SAMPLED_S = 0.05
#: Room in /dev/shm for the models; with less they go to the disk.
ROOM_BYTES = 24 * GIB


def main() -> int:
    """Measure everything; returns 0 if every cell ended as it should or had a reason not to run."""
    options = _options()
    on_cpu = options.gpu == "cpu"
    if not on_cpu and not usable_devices():
        print("No NVIDIA GPU, nothing was measured. To try it without a GPU: --gpu cpu --model tiny", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="finetune-gpu-") as folder, _models_folder(options.model) as models:
        session = Session(options, Path(folder), Path(models), Results(options.results, _facts(on_cpu)))
        session.run()
    return 0 if session.as_expected else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="auto", choices=("auto", "cpu"))
    parser.add_argument("--model", default="Qwen/Qwen2.5-7B-Instruct", help="a model of the catalogue, a config.json, or tiny")
    parser.add_argument("--layers", type=int, default=8, help="number of layers in most cells")
    parser.add_argument("--length", type=int, help="length of the longest row, in tokens")
    parser.add_argument("--steps", type=int, help="optimizer steps per cell")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--only", default="", help="names of cells, separated by commas")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    on_cpu = options.gpu == "cpu"
    options.length = options.length or (64 if on_cpu else 2048)
    options.steps = options.steps or (3 if on_cpu else 8)
    options.results = options.results.absolute()
    return options


def _facts(on_cpu: bool) -> dict[str, Any]:
    """Return the facts of every line: time, GPU and driver."""
    session = {"session": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    device = None if on_cpu else usable_devices()[0]
    return {**session, "card": device.name if device else None, "driver": device.driver if device else None}


def _models_folder(model: str) -> tempfile.TemporaryDirectory[str]:
    """A folder for the models: in memory where it fits."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > ROOM_BYTES
    return tempfile.TemporaryDirectory(prefix="finetune-models-", dir=memory if roomy and model != "tiny" else None)


class CardWatch:
    """Samples the used bytes of each visible GPU inside `with`, through NVML, which opens no CUDA context.

    `growth` are the peaks less `before`, the bytes at the start.
    """

    def __init__(self) -> None:
        self._cards = [nvidia.open_device(device.uuid) for device in usable_devices()]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> CardWatch:
        self.before = self._peaks = self._used()
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def growth(self) -> list[int]:
        """Bytes by card; empty without a card."""
        return [peak - before for peak, before in zip(self._peaks, self.before, strict=True)]

    def _used(self) -> list[int]:
        return [card.memory()[2] for card in self._cards]

    def _sample(self) -> None:
        while self.before and not self._ended.wait(SAMPLED_S):
            self._peaks = list(map(max, self._peaks, self._used()))


class Session:
    """One call: its folders, its end, its results."""

    def __init__(self, options: argparse.Namespace, folder: Path, models: Path, results: Results) -> None:
        self.options, self.folder, self.models, self.results = options, folder, models, results
        self.on_cpu = options.gpu == "cpu"
        self.deadline = time.monotonic() + 60 * options.minutes
        self.matmul_flops: float | None = None
        self.card_growth: list[int] = []
        self.as_expected = True
        wanted = [name for name in options.only.split(",") if name]
        self.cells = [cell for cell in CELLS if not wanted or cell.name in wanted]
        own = {"FINETUNE_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as in NVML
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
        if self.on_cpu:
            own["OMP_NUM_THREADS"] = "1"  # two cells run at once
        self.environment = {**own, "PYTHONPATH": path}

    def run(self) -> None:
        """Probe, plan, and run the cells; a line for each."""
        with ThreadPoolExecutor() as pool:
            futures = {full: pool.submit(self._make_model, full) for full in (False, True)}
            self._probe()
            for model in futures.values():
                model.result()
        plans = self._plan()
        with ThreadPoolExecutor(2 if self.on_cpu else 1) as pool:  # on a CPU nothing is timed for its own sake
            list(pool.map(lambda cell: self._cell(cell, plans.get(cell.name, {})), self.cells))
        self._second_card()

    def left_s(self) -> float:
        """Seconds until the end of the call."""
        return self.deadline - time.monotonic()

    def model(self, full: bool) -> str:
        """The model of a cell: its folder, or the bundled one."""
        return "tiny" if self.options.model == "tiny" else str(self.models / ("full" if full else "part"))

    def _make_model(self, full: bool) -> None:
        if self.options.model == "tiny" or not any(cell.full_depth == full for cell in self.cells):
            return
        layers = [] if full else [str(self.options.layers)]
        self._process(["benchmarks.gpu.random_model", self.options.model, self.model(full), *layers], f"model-{full}", MOST_S)

    def _probe(self) -> None:
        if self.options.only:
            return
        code, lines = self._process(["benchmarks.gpu.probe"], "probe", 90)
        for line in lines:
            error = line.get("error")
            state = "finished" if error is None else "skipped" if NEEDS_CARD in error else "failed"
            self.results.add(f"probe {line.pop('part')}", state=state, **line)
            self.matmul_flops = line.get("flops", self.matmul_flops)
        if code != 0:
            self.results.add("probe", state="failed", error=self._tail("probe", code))
            self.as_expected = False

    def _plan(self) -> dict[str, dict[str, Any]]:
        """Plan all cells and create their runs, in parallel; cells with the same forecast share a process."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for cell in self.cells:
            if not (cell.card_only and self.on_cpu):
                groups.setdefault(f"{cell.settings} {cell.full_depth}", []).append(self._wish(cell))
        count = max(1, min(len(groups), (os.cpu_count() or 1) // 2))
        parts: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        for number, group in enumerate(groups.values()):
            parts[number % count] += group
        with ThreadPoolExecutor(count) as pool:
            plans = pool.map(self._plan_part, range(count), parts)
        return {plan["cell"]: plan for part in plans for plan in part}

    def _plan_part(self, number: int, wishes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        path, log = self.folder / f"wishes-{number}.json", f"plans-{number}"
        path.write_text(json.dumps(wishes))
        code, plans = self._process(["benchmarks.gpu.plans", str(path)], log, self.left_s())
        planned = {plan["cell"] for plan in plans}
        unplanned = [wish["cell"] for wish in wishes if wish["cell"] not in planned]
        return plans + [{"cell": cell, "error": self._tail(log, code)} for cell in unplanned]

    def _wish(self, cell: Cell) -> dict[str, Any]:
        length, steps = self.options.length, self.options.steps
        rows, held_out = self.folder / f"rows-{cell.documents}.jsonl", self.folder / f"held-out-{cell.documents}.jsonl"
        for path, count in ((rows, 4 * steps * cell.documents), (held_out, 4)):
            if not path.exists():
                write_rows(path, length, count, cell.documents)
        recipe = {
            **COMMON, **cell.settings, "model_name_or_path": self.model(cell.full_depth), "gpu": self.options.gpu,
            "dataset": {"path": str(rows), "eval_path": str(held_out), "format": "text"}, "max_length": length,
            "max_steps": steps, "eval_steps": steps, "save_steps": steps, "output_dir": str(self.folder / "runs" / cell.name),
        }  # fmt: skip
        return {"cell": cell.name, "recipe": recipe, "cap": cell.cap}

    def _cell(self, cell: Cell, plan: dict[str, Any]) -> None:
        """Run a cell and write its line; any error is a line, too."""
        began = time.monotonic()
        try:
            outcome = self._refused(cell, plan) or self._measured(cell, plan)
        except Exception as error:  # noqa: BLE001 - recorded, and the next cell goes on
            outcome = {"state": "failed", "error": f"{type(error).__name__}: {error}"}
        if "not available" in str(outcome["error"]):
            outcome["state"] = "skipped"
        as_expected = outcome["state"] in (cell.ends, "skipped") and not outcome.get("wrong")
        self.as_expected &= as_expected
        facts = {"what": cell.what, "settings": cell.settings, "length": self.options.length, "full_depth": cell.full_depth}
        ends = {"expected": cell.ends, "as_expected": as_expected, "took_s": time.monotonic() - began}
        self.results.add(**{**facts, **plan, **outcome, **ends, "cell": cell.name})

    def _refused(self, cell: Cell, plan: dict[str, Any]) -> dict[str, Any] | None:
        """Return why a cell does not start, or None."""
        if cell.card_only and self.on_cpu:
            return {"state": "skipped", "error": NEEDS_CARD}
        if "run" not in plan:
            return {"state": "failed", "error": f"plan: {plan.get('error')}"}
        return {"state": "skipped", "error": "no time was left"} if self.left_s() < LEAST_S else None

    def _measured(self, cell: Cell, plan: dict[str, Any]) -> dict[str, Any]:
        """Run the cell's process; returns its state, memory by phase and speed."""
        run, result = RunDirectory(Path(plan["run"])), self.folder / f"{cell.name}.json"
        command = ["benchmarks.gpu.attempt", str(run.path), str(result), *["--peft-cast"] * cell.peft_cast]
        limit_s = self.left_s() if self.on_cpu else min(MOST_S, self.left_s())
        cards = worker_environment(cards_of(read_plan(run.plan)))  # as the supervisor does: only the planned card is visible
        environment = {**cards, **self.environment, **cell.environment}
        with CardWatch() as watch:
            code, _ = self._process(command, cell.name, limit_s, environment)
        self.card_growth = [max(pair) for pair in zip(watch.growth, self.card_growth or watch.growth, strict=True)]
        own = json.loads(result.read_text()) if result.exists() else {}
        outcome = of_events(read_events(run.events) if run.events.exists() else [])
        if code is None or code not in (0, 5) or (code == 5) != (outcome["state"] == OUT_OF_MEMORY) or not outcome["state"]:
            outcome["state"] = "failed" if code is not None else "timed out"
            outcome["error"] = outcome.get("error") or self._tail(cell.name, code)
        outcome["phases"] = {**own.get("phases", {}), **outcome.get("phases", {})}
        for peaks in outcome["phases"].values():  # the whole card, less what was in use before
            used = peaks.pop("card_used_bytes", None)
            peaks["card_bytes"] = used - watch.before[0] if used and len(watch.before) == 1 else None
        outcome["allocator"] = own.get("allocator", {})
        measured = outcome.get("measured", {})
        measured["card_bytes"] = max(watch.growth, default=None)
        measured.update(self._utilisation(measured, plan))
        outcome["wrong"] = _cap_problem(outcome["allocator"], plan) if cell.cap else None
        return outcome

    def _utilisation(self, measured: dict[str, Any], plan: dict[str, Any]) -> dict[str, float | None]:
        """Model FLOP/s as a share of the card's published rate (MFU) and of the rate that the probe measured."""
        rate, flops = measured.get("tokens_per_s"), plan.get("flops_per_token")
        achieved = rate * flops if rate and flops else None
        published = plan.get("bf16_flops")
        return {
            "flops": achieved, "mfu": achieved / published if achieved and published else None,
            "share_of_measured_matmul": achieved / self.matmul_flops if achieved and self.matmul_flops else None,
        }  # fmt: skip

    def _second_card(self) -> None:
        """Runs on one card leave every other one empty."""
        if self.options.only:
            return
        used = [size for size in self.card_growth if size > 64 * MIB]
        state, error = "finished" if len(used) == 1 else "failed", None
        if len(self.card_growth) < 2:
            state, error = "skipped", NEEDS_CARD if self.on_cpu else "there is one card"
        self.as_expected &= state != "failed"
        self.results.add("second card", state=state, error=error, grown_bytes=self.card_growth)

    def _process(
        self, command: list[str], log: str, limit_s: float, environment: dict[str, str] | None = None
    ) -> tuple[int | None, list[dict[str, Any]]]:
        """Run `python -m COMMAND`; its status, None after `limit_s`, and the JSON lines that it printed."""
        output = self._log(log)
        with output.open("wb") as file:
            child = subprocess.Popen(
                [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                env={**os.environ, **(environment or self.environment)}, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = child.wait(max(1.0, limit_s))
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                code = None
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        return code, [json.loads(line) for line in lines if line.startswith('{"')]

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def _tail(self, log: str, code: int | None) -> str:
        """Why a process ended so: its status and its last words."""
        ended = "ran out of time" if code is None else f"ended with status {code}"
        return f"{ended}: {self._log(log).read_text(encoding='utf-8', errors='replace')[-1500:]}"


def _cap_problem(allocator: dict[str, Any], plan: dict[str, Any]) -> str | None:
    """Return the problem of the memory fraction: it must bound the allocator by the budget, less at most the context's size."""
    cap, budget, context = allocator.get("cap_bytes"), plan.get("budget_bytes"), plan.get("context_bytes") or 0
    if not cap or not budget:
        return "the memory fraction is not known"
    if not budget - 2 * context - GIB <= cap <= budget:
        return f"the allocator may take {cap / GIB:.2f} GiB of a budget of {budget / GIB:.2f} GiB"
    return None


if __name__ == "__main__":
    sys.exit(main())
