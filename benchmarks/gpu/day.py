"""This project's speed beside Unsloth's and TRL's on a real GPU, in one call of less than ten minutes.

    python -m benchmarks.gpu.day --seconds 575 --results day.jsonl [--unsloth FOLDER] [--layers N] [--only TEXT ...]

Each job is a process that trains at one length, and then takes steps at further lengths and one that lists its kernels. Two
questions more: does a resumed run end with the bits of a whole one, and do the addresses of cudaMalloc rise? What tells most
runs first; a line is in the results when it has ended, and a second call runs the rest. FOLDER has packages that only Unsloth's
process imports (benchmarks/gpu/README.md). Times are synchronised: the larger of host and GPU time. The model has an 8B
model's shape and random weights. `finetune doctor --measure` before it lets plans use this GPU's rates.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.random_model import make_model, write_rows
from benchmarks.peers import run_peer
from finetune.files import sha256_of

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "meta-llama/Llama-3.1-8B-Instruct"
EVERY = {"activation_checkpointing": True, "activation_checkpointing_every_n_layers": 1}
NOTHING = {"activation_checkpointing": False}
LONG = {"activation_checkpointing": "offload", "optim": "paged_adamw_8bit"}
BUDGET = {"memory_budget": "23 GiB"}
#: (name, program, tokens, settings, further lengths), those that answer most first
JOBS: tuple[tuple[str, str, int, dict[str, Any], tuple[int, ...]], ...] = (
    ("compiled", "finetune", 2048, {**BUDGET, **NOTHING, "torch_compile": True}, (8192,)),
    ("Unsloth", "unsloth", 2048, {}, (8192, 32768)),
    ("TRL", "trl", 2048, {}, (8192,)),
    ("compiled, recomputed", "finetune", 2048, {**EVERY, "torch_compile": True}, (8192, 32768)),
    ("Unsloth, nothing recomputed", "unsloth", 2048, {"use_gradient_checkpointing": False}, (8192,)),
    ("lean", "finetune", 2048, {**BUDGET, **NOTHING, "torch_compile": False}, (8192,)),
    ("long rows", "finetune", 32768, {**BUDGET, **LONG}, (8192, 2048)),
    ("planned", "finetune", 2048, BUDGET, ()),
    ("layers in host memory", "finetune", 2048, {**BUDGET, "layer_offloading": "cpu"}, (8192,)),
    ("lean, recomputed", "finetune", 2048, {**EVERY, "torch_compile": False}, ()),
)
STEPS = 12
#: Seconds that one job may take, and those below which none starts.
JOB_S, LEAST_S = 150, 20


def main() -> int:
    """Run the remaining jobs within the time; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=575)
    parser.add_argument("--results", type=Path, default=Path("day.jsonl"))
    parser.add_argument("--unsloth", type=Path, help="folder of Unsloth's packages; without it, Unsloth's jobs are skipped")
    parser.add_argument("--layers", type=int, help="number of layers, fewer than the model's 32")
    parser.add_argument("--only", nargs="*", default=[], help="run jobs whose names have all these texts")
    options = parser.parse_args()
    ends_at, failed = time.monotonic() + options.seconds, False
    lines = options.results.read_text(encoding="utf-8").splitlines() if options.results.exists() else []
    ended_names = {line["name"] for line in map(json.loads, lines) if not line.get("failed")}
    models_folder = next(path for path in (Path("/dev/shm"), Path(tempfile.gettempdir())) if path.is_dir())  # noqa: S108
    model = models_folder / f"finetune-day-{options.layers or 'all'}"
    if not (model / "done").exists():
        make_model(SHAPE, model, options.layers)
        (model / "done").touch()
    questions: list[tuple[str, Any]] = [
        (job[0], functools.partial(trained, *job[1:], model, options.unsloth))
        for job in JOBS
        if job[1] != "unsloth" or options.unsloth
    ]
    questions.insert(3, ("bits after a resume", resumed))
    for name, answer in (*questions, ("addresses", addresses)):
        if name in ended_names or not all(text in name for text in options.only):
            continue
        began = time.monotonic()
        if ends_at - began < LEAST_S:
            print(f"{name}: no time left", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="finetune_day_") as folder:
            try:
                figures = answer(Path(folder), min(JOB_S, ends_at - began))
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                figures = {"failed": f"{type(error).__name__}: {error}"[:300]}
        failed |= bool(figures.get("failed"))
        line = {"name": name, **figures, "job_s": round(time.monotonic() - began, 1)}
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(summary(line), flush=True)
    return int(failed)


def trained(
    program: str, tokens: int, settings: dict[str, Any], lengths: tuple[int, ...], model: Path, unsloth: Path, folder: Path,
    limit_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Return the figures of a training."""
    write_rows(folder / "rows.jsonl", tokens, STEPS)
    job = {
        "model": str(model), "rows": str(folder / "rows.jsonl"), "tokens": tokens, "micro_batch": 1, "steps": STEPS, "rank": 16,
        "settings": settings, "timed": True, "lengths": lengths, "listed": True,
    }  # fmt: skip
    paths = [str(unsloth if program == "unsloth" else ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return {"tokens": tokens, "settings": settings, **run_peer(program, sys.executable, job, folder, environment, limit_s)}


def resumed(folder: Path, limit_s: float) -> dict[str, Any]:
    """Return whether a stopped and resumed run ends with the bits of an uninterrupted run."""
    finetune, stopped, whole = [sys.executable, "-m", "finetune"], folder / "stopped", folder / "whole"
    run = [*finetune, "run", "tiny-cpu", "gpu=auto", "max_steps=20", "save_steps=5", "torch_compile=true"]
    with subprocess.Popen([*run, f"output_dir={stopped}"], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not (stopped / "checkpoints" / "checkpoint-10").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    for command in ([*run, f"output_dir={whole}"], [*finetune, "resume", str(stopped)]):
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
        if ended.returncode:
            return {"failed": (ended.stdout + ended.stderr)[-300:]}
    hashes = {sha256_of(path / "adapter" / "adapter_model.safetensors") for path in (whole, stopped)}
    return {"equal": len(hashes) == 1, "stopped_with": process.returncode}


def addresses(_folder: Path, limit_s: float) -> dict[str, Any]:
    """Return the addresses of successive cudaMalloc calls: torch prefers the lower of two equal blocks."""
    code = "import torch; blocks = [torch.cuda.caching_allocator_alloc(n << 20) for n in (64, 2, 32, 512, 20, 20, 64)]"
    command, environment = (
        [sys.executable, "-c", f"{code}; print(*blocks)"],
        {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    numbers = [int(number) for number in printed.stdout.split()]
    return {"addresses": numbers, "rising": numbers == sorted(numbers)} if numbers else {"failed": printed.stderr[-300:]}


def summary(line: dict[str, Any]) -> str:
    """A line for a person."""
    times = sorted(line.get("step_s") or [])[: STEPS // 2]
    speeds = {line["tokens"]: times[len(times) // 2]} if times else {}
    speeds |= {int(tokens): min(timed["s"]) for tokens, timed in line.get("lengths", {}).items() if "s" in timed}
    shown = [f"{tokens:,} tokens: {tokens / seconds:,.0f} tok/s" for tokens, seconds in speeds.items()]
    shown += [f"{line[name] / 2**30:.3f} GiB {name}" for name in ("allocated_bytes", "forecast_bytes") if line.get(name)]
    shown += [f"{name} {line[name]}" for name in ("equal", "stopped_with", "graphs", "compile_s", "failed") if name in line]
    return f"{line['name']}: {', '.join(shown)} ({line['job_s']} s)"


if __name__ == "__main__":
    sys.exit(main())
