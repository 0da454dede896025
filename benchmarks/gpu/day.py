"""This project's speed beside Unsloth's and TRL's on a real GPU, in one call of less than ten minutes.

    python -m benchmarks.gpu.day --seconds 575 --results day.jsonl [--unsloth FOLDER] [--layers N] [--only TEXT ...]

Each job is a process that trains at one length, and then takes steps at further lengths. The most informative jobs run first; a
job's line is in the results when it has ended, and a second call runs the remaining jobs. FOLDER has packages that only
Unsloth's process imports (benchmarks/gpu/README.md). Times are synchronised: the larger of host and GPU time. The model has an
8B model's shape and random weights.
"""

from __future__ import annotations

import argparse
import hashlib
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

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "meta-llama/Llama-3.1-8B-Instruct"
EVERY = {"activation_checkpointing": True, "activation_checkpointing_every_n_layers": 1}
NOTHING = {"activation_checkpointing": False}
LONG = {"activation_checkpointing": "offload", "optim": "paged_adamw_8bit"}
BUDGET = {"memory_budget": "23 GiB"}
#: (name, program, tokens, settings, further lengths, whether its kernels are listed), those that answer most first
JOBS: tuple[tuple[str, str, int, dict[str, Any], tuple[int, ...], bool], ...] = (
    ("compiled", "finetune", 2048, {**BUDGET, **NOTHING, "torch_compile": True}, (8192,), True),
    ("Unsloth", "unsloth", 2048, {}, (8192, 32768), True),
    ("TRL", "trl", 2048, {}, (8192,), False),
    ("compiled, recomputed", "finetune", 2048, {**EVERY, "torch_compile": True}, (8192, 32768), True),
    ("Unsloth, nothing recomputed", "unsloth", 2048, {"use_gradient_checkpointing": False}, (8192,), False),
    ("lean", "finetune", 2048, {**BUDGET, **NOTHING, "torch_compile": False}, (8192,), True),
    ("long rows", "finetune", 32768, {**BUDGET, **LONG}, (8192, 2048), False),
    ("planned", "finetune", 2048, BUDGET, (), False),
    ("layers in host memory", "finetune", 2048, {**BUDGET, "layer_offloading": "cpu"}, (8192,), False),
    ("lean, recomputed", "finetune", 2048, {**EVERY, "torch_compile": False}, (), False),
)
STEPS = 12
#: Seconds that one job may take.
JOB_S = 150


def main() -> int:
    """Run the remaining jobs within the time; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=575)
    parser.add_argument("--results", type=Path, default=Path("day.jsonl"))
    parser.add_argument("--unsloth", type=Path, help="folder of Unsloth's packages; without it, Unsloth's jobs are skipped")
    parser.add_argument("--layers", type=int, help="number of layers, fewer than the model's 32")
    parser.add_argument("--only", nargs="*", default=[], help="run jobs whose names have all these texts")
    options = parser.parse_args()
    ends_at, failed = time.monotonic() + options.seconds, 0
    lines = options.results.read_text(encoding="utf-8").splitlines() if options.results.exists() else []
    ended_names = {line["name"] for line in map(json.loads, lines) if not line.get("failed")}
    models_folder = next(path for path in (Path("/dev/shm"), Path(tempfile.gettempdir())) if path.is_dir())  # noqa: S108
    model = models_folder / f"finetune-day-{options.layers or 'all'}"
    if not (model / "done").exists():
        make_model(SHAPE, model, options.layers)
        (model / "done").touch()
    questions = [(job[0], lambda job=job: trained(job, model, options.unsloth, ends_at)) for job in JOBS]
    questions.insert(3, ("bits after a resume", lambda: resumed(ends_at)))
    questions.insert(1, ("rates", rates))
    questions.append(("addresses", addresses))
    for name, ask in questions:
        left = ends_at - time.monotonic()
        if (
            name in ended_names
            or not all(text in name for text in options.only)
            or (name.startswith("Unsloth") and not options.unsloth)
        ):
            continue
        if left < 20:
            print(f"{name}: no time left", flush=True)
            continue
        began = time.monotonic()
        try:
            answer = ask()
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        failed += bool(answer.get("failed"))
        line = {"name": name, **answer, "job_s": round(time.monotonic() - began, 1)}
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(summary(line), flush=True)
    return int(failed > 0)


def trained(job: Any, model: Path, unsloth: Path | None, ends_at: float) -> dict[str, Any]:
    """Figures of a training."""
    _, program, tokens, settings, lengths, listed = job
    with tempfile.TemporaryDirectory(prefix="finetune_day_") as temporary:
        folder = Path(temporary)
        (folder / "out").mkdir()
        write_rows(folder / "rows.jsonl", tokens, STEPS)
        values = {
            "model": str(model), "rows": str(folder / "rows.jsonl"), "tokens": tokens, "micro_batch": 1, "steps": STEPS,
            "rank": 16, "settings": settings, "folder": str(folder / "out"), "timed": True, "lengths": lengths,
            "listed": listed,
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(values), encoding="utf-8")
        packages = os.environ.get("PYTHONPATH", "")
        paths = [str(unsloth)] if program == "unsloth" else [str(ROOT)]
        command = [sys.executable, str(ROOT / "benchmarks" / "peer_run.py"), program, "job.json", "result.json"]
        process = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join([*paths, packages])}, capture_output=True,
            text=True, timeout=min(JOB_S, ends_at - time.monotonic()), check=False,
        )  # fmt: skip
        if not (folder / "result.json").exists():
            return {"failed": process.stderr[-300:]}
        return {"tokens": tokens, "settings": settings, **json.loads((folder / "result.json").read_text(encoding="utf-8"))}


def resumed(ends_at: float) -> dict[str, Any]:
    """Return whether a stopped and resumed run ends with the bits of an uninterrupted run."""
    with tempfile.TemporaryDirectory(prefix="finetune_day_") as temporary:
        folder, hashes, stopped_with = Path(temporary), [], 0
        for name, stop_at in (("whole", None), ("stopped", 10)):
            run = [sys.executable, "-m", "finetune", "run", "tiny-cpu", "gpu=auto", "max_steps=20", "save_steps=5",
                   "torch_compile=true", f"output_dir={folder / name}"]  # fmt: skip
            if stop_at:
                with subprocess.Popen(run, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                    while process.poll() is None and not (folder / name / "checkpoints" / f"checkpoint-{stop_at}").exists():
                        time.sleep(0.05)
                    process.send_signal(signal.SIGINT)
                    stopped_with = process.wait()
                run = [sys.executable, "-m", "finetune", "resume", str(folder / name)]
            process_end = subprocess.run(
                run, cwd=ROOT, capture_output=True, text=True, timeout=ends_at - time.monotonic(), check=False
            )
            if process_end.returncode:
                return {"failed": (process_end.stdout + process_end.stderr)[-300:]}
            hashes.append(hashlib.sha256((folder / name / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest())
        return {"equal": hashes[0] == hashes[1], "stopped_with": stopped_with}


def rates() -> dict[str, Any]:
    """Return the GPU's rates by `finetune doctor --measure`; plans of later jobs use them."""
    command = [sys.executable, "-m", "finetune", "doctor", "--measure", "--json"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    finding = json.loads(printed)["findings"][0]
    return finding["facts"] or {"failed": finding["what"]}


def addresses() -> dict[str, Any]:
    """Return the addresses of successive cudaMalloc calls: torch prefers the lower of two equal blocks."""
    code = "import torch; blocks = [torch.cuda.caching_allocator_alloc(n << 20) for n in (64, 2, 32, 512, 20, 20, 64)]"
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*blocks)"], env=environment, capture_output=True, text=True, check=False
    )
    numbers = [int(number) for number in printed.stdout.split()]
    return {"addresses": numbers, "rising": numbers == sorted(numbers)} if numbers else {"failed": printed.stderr[-300:]}


def summary(line: dict[str, Any]) -> str:
    """A line for a person."""
    times = sorted(line.get("step_s") or [])[: STEPS // 2]
    speeds = {line["tokens"]: times[len(times) // 2]} if times else {}
    speeds |= {int(tokens): min(timed["s"]) for tokens, timed in line.get("lengths", {}).items() if "s" in timed}
    figures_shown = [f"{tokens:,} tokens: {tokens / seconds:,.0f} tok/s" for tokens, seconds in speeds.items()]
    figures_shown += [
        f"{line[name] / 2**30:.3f} GiB {name.split('_')[0]}" for name in ("allocated_bytes", "forecast_bytes") if line.get(name)
    ]
    figures_shown += [
        f"{name} {line[name]}" for name in ("equal", "stopped_with", "graphs", "compile_s", "failed") if name in line
    ]
    return f"{line['name']}: {', '.join(figures_shown)} ({line['job_s']} s)"


if __name__ == "__main__":
    sys.exit(main())
