"""Real runs on one GPU beside their forecasts, in less than ten minutes: see README.md in this folder.

    python -m benchmarks.gpu.measure                                       # this machine's GPU
    python -m benchmarks.gpu.measure --gpu cpu --model tiny                # the same without a GPU, in minutes

A cell's line is written as soon as the cell ends. The line of a failed cell, or of a cell without time left, has the error, and
the next cell runs. Runs have no supervisor, so nothing is retried.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.cells import CELLS, COMMON, FINISHED, OUT_OF_MEMORY, Cell
from benchmarks.gpu.random_model import make_model, write_rows
from finetune.card import nvidia
from finetune.card.visible import hide_gpus, usable_devices
from finetune.events import Event, Phase, Step, read_events
from finetune.files import to_json
from finetune.units import GIB

if TYPE_CHECKING:
    from finetune.planner.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "reference" / "gpu_results.jsonl"
NEEDS_CARD = "needs a card"
#: A cell is not begun with less than this left, and is ended after that much.
LEAST_S, MOST_S = 20, 150
#: Room in /dev/shm for the models; with less they go to the disk.
ROOM_BYTES = 24 * GIB
#: Steps that don't count for speed: libraries load kernels in them.
WARM_UP_STEPS = 2


def main() -> int:
    """Measure everything; returns 0 if every cell ended as it should or had a reason not to run."""
    options = _options()
    on_cpu = options.gpu == "cpu"
    if not on_cpu and not usable_devices():
        print("No NVIDIA GPU, nothing was measured. To try it without a GPU: --gpu cpu --model tiny", file=sys.stderr)
        return 2
    hide_gpus()  # this process plans; only a run opens the GPU
    wanted = [name for name in options.only.split(",") if name]
    cells = [cell for cell in CELLS if not wanted or cell.name in wanted]
    deadline, as_expected = time.monotonic() + 60 * options.minutes, True
    device = None if on_cpu else usable_devices()[0]
    facts = {
        "session": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "card": device.name if device else None,
        "driver": device.driver if device else None,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="finetune-gpu-") as folder, _models_folder(options.model) as models:
        os.environ |= {
            "FINETUNE_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as in NVML
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }  # fmt: skip
        paths = _models(options, {cell.full_depth for cell in cells}, Path(models))
        for cell in cells:
            began = time.monotonic()
            try:
                outcome = _outcome(cell, options, paths[cell.full_depth], Path(folder), deadline)
            except Exception as error:  # noqa: BLE001 - recorded, and the next cell goes on
                outcome = {"state": "failed", "error": f"{type(error).__name__}: {error}"}
            ended_right = outcome["state"] in (cell.ends, "skipped")
            line = {
                **facts, "cell": cell.name, "what": cell.what, "length": options.length, **outcome, "expected": cell.ends,
                "as_expected": ended_right, "took_s": time.monotonic() - began,
            }  # fmt: skip
            as_expected &= ended_right
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(to_json(line)) + "\n")
            print(f"{cell.name:<16} {line['state']}  {(line['error'] or '')[:200]}", flush=True)
    return 0 if as_expected else 1


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
    return options


def _models_folder(model: str) -> tempfile.TemporaryDirectory[str]:
    """A folder for the models: in memory where it fits."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > ROOM_BYTES
    return tempfile.TemporaryDirectory(prefix="finetune-models-", dir=memory if roomy and model != "tiny" else None)


def _models(options: argparse.Namespace, depths: set[bool], folder: Path) -> dict[bool, str]:
    """The models, by whether they have all layers."""
    if options.model == "tiny":
        return dict.fromkeys(depths, "tiny")
    paths = {full: folder / ("full" if full else "part") for full in depths}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda full: make_model(options.model, paths[full], None if full else options.layers), paths))
    return {full: str(path) for full, path in paths.items()}


def _outcome(cell: Cell, options: argparse.Namespace, model: str, folder: Path, deadline: float) -> dict[str, Any]:
    """Plan a cell and run it; returns its state, forecast and measurements, or why it does not start."""
    from finetune.recipe import recipe_from
    from finetune.run.card import cards_of
    from finetune.run.prepare import create_run, prepare
    from finetune.run.supervise import worker_environment

    on_cpu = options.gpu == "cpu"
    if cell.card_only and on_cpu:
        return {"state": "skipped", "error": NEEDS_CARD}
    if deadline - time.monotonic() < LEAST_S:
        return {"state": "skipped", "error": "no time was left"}
    rows, held_out = folder / f"rows-{cell.documents}.jsonl", folder / f"held-out-{cell.documents}.jsonl"
    for path, count in ((rows, 4 * options.steps * cell.documents), (held_out, 4)):
        if not path.exists():
            write_rows(path, options.length, count, cell.documents)
    values = {
        **COMMON, **cell.settings, "model_name_or_path": model, "gpu": options.gpu,
        "dataset": {"path": str(rows), "eval_path": str(held_out), "format": "text"}, "max_length": options.length,
        "max_steps": options.steps, "eval_steps": options.steps, "save_steps": options.steps,
        "output_dir": str(folder / "runs" / cell.name),
    }  # fmt: skip
    prepared = prepare(recipe_from(values), force=True)
    if cell.cap and prepared.plan.forecast is not None:
        name, factor = cell.cap
        budget = int(getattr(prepared.plan.forecast, name) * factor)
        prepared = prepare(recipe_from({**values, "memory_budget": str(budget)}), force=True)
    run, plan = create_run(prepared), prepared.plan
    used_before = 0 if on_cpu else nvidia.open_device(usable_devices()[0].uuid).memory()[2]
    environment = {**worker_environment(cards_of(plan)), **cell.environment}
    environment.pop("PYTHONSAFEPATH", None)
    left_s = max(1.0, deadline - time.monotonic())
    try:
        worker = subprocess.run(
            [sys.executable, "-m", "finetune.run.worker", str(run.path)], env=environment, capture_output=True, text=True,
            timeout=left_s if on_cpu else min(MOST_S, left_s), check=False,
        )  # fmt: skip
        state = {0: FINISHED, 5: OUT_OF_MEMORY}.get(worker.returncode, "failed")
        error = f"ended with status {worker.returncode}: {worker.stderr[-1500:]}" if state == "failed" else None
    except subprocess.TimeoutExpired:
        state, error = "timed out", "ran out of time"
    events = read_events(run.events) if run.events.exists() else []
    forecast = plan.as_json()["forecast"]
    return {
        "state": state,
        "error": error,
        "settings": plan.settings,
        "forecast": forecast,
        **_figures(events, plan, used_before),
    }


def _figures(events: list[Event], plan: Plan, used_before: int) -> dict[str, Any]:
    """Losses, peaks over all steps and of the other phases, and speed without the first steps."""
    steps = [event for event in events if isinstance(event, Step)]
    fields = ("peak_allocated_bytes", "peak_reserved_bytes", "card_used_bytes", "process_peak_rss_bytes")
    phases = {event.phase: {name: getattr(event, name) for name in fields} for event in events if isinstance(event, Phase)}
    phases["train"] = {name: max((getattr(step, name) or 0 for step in steps), default=0) or None for name in fields}
    timed = [(step.step_s, step.real_tokens) for step in steps if step.step_s and step.real_tokens][WARM_UP_STEPS:]
    tokens_per_s = sum(tokens for _, tokens in timed) / sum(s for s, _ in timed) if timed else None
    published = plan.card.bf16_flops
    card_bytes = max((peaks["card_used_bytes"] or 0 for peaks in phases.values()), default=0)
    return {
        "losses": [step.loss for step in steps], "phases": phases,
        "measured": {
            "allocated_bytes": phases["train"]["peak_allocated_bytes"],
            "reserved_bytes": phases["train"]["peak_reserved_bytes"],
            "card_bytes": card_bytes - used_before if card_bytes else None,
            "step_s": statistics.median(s for s, _ in timed) if timed else None, "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * _flops_per_token(plan) / published if tokens_per_s and published else None,
        },
    }  # fmt: skip


def _flops_per_token(plan: Plan) -> float:
    """Model FLOPs of a training step by real token: nothing recomputed, and no gradient of frozen weights.

    A frozen weight costs 4 (forward, gradient of its input), an adapter's 6; causal attention 2 x layers x width x length
    forward and 2.5 times that backward.
    """
    from finetune.model.configuration import read_config
    from finetune.planner.shape import shape_of

    settings, data = plan.settings, plan.data
    shape = shape_of(dict(read_config(settings)), settings)
    mean = sum(length * length for length in data.lengths) / max(1, data.total_tokens) if data else settings.max_length
    attention = 3.5 * 2 * shape.layers * shape.attention_width * mean
    return 4 * (shape.computed + shape.head) + 6 * settings.lora_r * shape.adapter_per_rank + attention


if __name__ == "__main__":
    sys.exit(main())
