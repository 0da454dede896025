"""This project beside plain TRL, LLaMA-Factory and Axolotl: the same rows in the same order, seed, rank and layers.

    python -m benchmarks.peers                                                     # this project and TRL of this environment
    python -m benchmarks.peers --peer llamafactory=/venvs/llamafactory/bin/python --peer axolotl=/venvs/axolotl/bin/python
    python -m benchmarks.peers --rounds 5 --write                                  # writes benchmarks/reference/peers.csv

Each peer runs with its defaults in a separate environment (`python -m venv`, `pip install llamafactory`) and process. Without
CUDA, LLaMA-Factory needs an environment without torchvision and without the compiled files of torchaudio, which need CUDA (`pip
uninstall torchvision`, `rm .../torchaudio/lib/*.so`).

A round has one run of each peer, and the order rotates from round to round. Ratios compare runs of the same round; the table
has their medians. The first steps are a warm-up and don't count. A peer has failed, however fast it was, if its loss differs
from this project's by more than TOLERANCE, in the first step or over the run. The line of a peer that can't run says why.

Without a GPU, seconds are processor seconds of the process's single thread, so that other programs don't count.
`docs/generate.py peers` makes the documentation's table from the results.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.tables import REFERENCE, write_table

PEERS = ("finetune", "trl", "llamafactory", "axolotl")
SHORTEST, USUAL, LONGEST = 24, 90, 480
BATCH, RANK, SEED, LEARNING_RATE = 8, 16, 42, 1e-3
#: Steps of a run that are its warm-up.
WARM_UP = 3
#: Largest difference of losses, as a share: in the first step, where adapters do nothing yet, and on average over the run,
#: where each peer's adapters began with other random numbers.
TOLERANCE = {"first": 0.002, "run": 0.02}
#: Seconds after which a run has hung.
LIMIT_S = 3600
COLUMNS = (
    "peer", "version", "device", "rounds", "rows", "first_step_s", "supervised_tokens_per_s", "real_tokens_per_s",
    "padded_tokens_per_s", "ratio", "least_ratio", "most_ratio", "peak_rss_mib", "allocated_mib", "reserved_mib",
    "first_loss", "last_loss", "loss_difference", "failed",
)  # fmt: skip


def main() -> int:
    """Run the rounds; returns 1 if a peer failed."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--rows", type=int, default=160)
    arguments.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="interpreter of a tool")
    arguments.add_argument("--gpu", default="cpu", help="the recipe's gpu: cpu or auto")
    arguments.add_argument("--write", action="store_true", help="write benchmarks/reference/peers.csv")
    options = arguments.parse_args()
    pythons = {"finetune": sys.executable, "trl": sys.executable, **dict(peer.split("=", 1) for peer in options.peer)}
    with tempfile.TemporaryDirectory() as temporary:
        prepared, job = prepare(Path(temporary), options.rows, options.gpu)
        runs: dict[str, list[dict[str, Any]]] = {peer: [] for peer in PEERS if peer in pythons}
        for number in range(options.rounds):
            order = list(runs)
            for peer in order[number % len(order) :] + order[: number % len(order)]:
                runs[peer].append(run(peer, pythons[peer], prepared, job, Path(temporary) / f"{peer}-{number}"))
                print(f"round {number}: {peer}: {figures_text(runs[peer][-1])}", flush=True)
    table = [row_of(peer, runs.get(peer, []), runs["finetune"], options.rows) for peer in PEERS]
    for row in table:
        print(", ".join(f"{name} {value}" for name, value in row.items() if value not in ("", None)))
    if options.write:
        write_table(REFERENCE / "peers.csv", table, COLUMNS)
    return int(any(row["failed"] and runs.get(row["peer"]) for row in table))


def prepare(folder: Path, rows: int, gpu: str) -> tuple[Any, dict[str, Any]]:
    """The planned run, and the job of all other peers: model, rows in the run's order, and settings."""
    from datasets import load_from_disk

    import finetune
    from finetune.methods.row_order import LongestEarly
    from finetune.recipe import recipe_from
    from finetune.run.prepare import create_run
    from finetune.run.prepare import prepare as plan_run

    drawn = random.Random(0)
    vocabulary = ["the", "a", "one", "some", "any", "this", "that", "it"]
    drawn_texts = [" ".join(drawn.choices(vocabulary, k=length(drawn))) for _ in range(rows)]
    source = folder / "unordered.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in drawn_texts), encoding="utf-8")
    prepared = plan_run(recipe_from({
        "model_name_or_path": "tiny", "dataset": {"path": str(source), "test_split_size": 0}, "gpu": gpu, "lora_r": RANK,
        "lora_alpha": 2.0 * RANK, "target_modules": "all-linear", "effective_batch_size": BATCH, "packing": False,
        "num_train_epochs": 1.0, "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "warmup_ratio": 0.0,
        "seed": SEED, "eval_steps": 0, "save_steps": 0, "output_dir": str(folder / "run"),
    }))  # fmt: skip
    plan = prepared.plan
    dataset = load_from_disk(str(create_run(prepared).data / "train"))
    order = list(LongestEarly([len(ids) for ids in dataset["input_ids"]], SEED, BATCH, plan.total_steps or 0))
    texts = [drawn_texts[row] for row in order]
    (folder / "rows").mkdir()
    ordered = folder / "rows" / "rows.jsonl"
    ordered.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    model, dtype = Path(finetune.__file__).parent / "bundled" / "tiny-base", plan.settings.dtype
    if dtype == "float32":
        model = in_float32(model, folder / "model")
    return prepared, {
        "model": str(model), "rows": str(ordered), "micro_batch": BATCH, "rank": RANK, "tokens": plan.settings.max_length,
        "steps": None, "dtype": dtype, "compared": True, "on_cuda": not plan.card.is_cpu,
    }  # fmt: skip


def settings_of(peer: str, on_cuda: bool) -> dict[str, Any]:
    """One epoch of the rows in their order; without CUDA Axolotl's Triton kernels are off."""
    usual = {"seed": SEED, "learning_rate": LEARNING_RATE, "bf16": on_cuda}
    trainer = {**usual, "num_train_epochs": 1.0, "lr_scheduler_type": "constant", "use_cpu": not on_cuda}
    kernels = {} if on_cuda else dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
    return {
        "finetune": {}, "trl": {**trainer, "train_sampling_strategy": "sequential"},
        "llamafactory": {**trainer, "disable_shuffling": True},
        "axolotl": {
            **usual, "num_epochs": 1, "lr_scheduler": "constant", "optimizer": "adamw_torch", "curriculum_sampling": True,
            "shuffle_merged_datasets": False, **kernels,
        },
    }[peer]  # fmt: skip


def in_float32(model: Path, folder: Path) -> Path:
    """A copy of the model in fp32: a peer that trains in the dtype of a model's files trains in this run's, too."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(model, dtype="float32").save_pretrained(folder)
    for file in model.iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    return folder


def length(drawn: random.Random) -> int:
    """Words of a row: lognormal, a range of 20."""
    return min(LONGEST, max(SHORTEST, round(USUAL * drawn.lognormvariate(0, 0.8))))


def run(peer: str, python: str, prepared: Any, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the figures of one run, or why it `failed`."""
    from finetune.run.prepare import create_run

    folder.mkdir()
    own = {"run": str(create_run(prepared).path)} if peer == "finetune" else {}
    environment = dict(os.environ) if python == sys.executable else {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return run_peer(peer, python, {**job, **own, "settings": settings_of(peer, job["on_cuda"])}, folder, environment, LIMIT_S)


def run_peer(
    peer: str, python: str, job: dict[str, Any], folder: Path, environment: dict[str, str], limit_s: float
) -> dict[str, Any]:
    """Return the figures of peer_run.py in another process, whose files are in `folder`, or why it `failed`."""
    result = folder / "result.json"
    (folder / "out").mkdir()
    (folder / "job.json").write_text(json.dumps({**job, "folder": str(folder / "out")}), encoding="utf-8")
    command = [Path.cwd() / python, Path(__file__).with_name("peer_run.py"), peer, folder / "job.json", result]
    try:
        process = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=limit_s, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    if not result.exists():
        last = [line for line in process.stderr.splitlines() if line.strip()][-1:]
        return {"failed": f"exit status {process.returncode}: {' '.join(last)[:200]}"}
    return json.loads(result.read_text(encoding="utf-8"))


def figures_text(figures: dict[str, Any]) -> str:
    """A run in a line."""
    if "failed" in figures:
        return figures["failed"]
    real = rate(figures, 1)
    return f"{real:,.0f} real tokens/s, loss {figures['losses'][0]:.4f} to {figures['losses'][-1]:.4f}"


def rate(figures: dict[str, Any], kind: int) -> float:
    """Tokens per second after the warm-up: 0 supervised, 1 real, 2 with padding."""
    return sum(counts[kind] for counts in figures["tokens"][WARM_UP:]) / sum(figures["step_s"][WARM_UP:])


def row_of(peer: str, runs: list[dict[str, Any]], ours: list[dict[str, Any]], rows: int) -> dict[str, Any]:
    """Return a line of the table: medians over the rounds, or why the peer failed."""
    row: dict[str, Any] = {**dict.fromkeys(COLUMNS, ""), "peer": peer, "rows": rows}
    if not runs:
        return {**row, "failed": "not run: no environment was given"}
    pairs = [(run, own) for run, own in zip(runs, ours, strict=True) if "failed" not in run and "failed" not in own]
    if not pairs:
        reasons = (run["failed"] for run in runs if "failed" in run)
        return {**row, "failed": next(reasons, "no run of this project to compare with")}
    good = [run for run, _ in pairs]
    ratios = [rate(run, 1) / rate(own, 1) for run, own in pairs]
    difference, why = compared(*pairs[0])

    median = statistics.median
    kinds = enumerate(("supervised", "real", "padded"))
    tokens = {name: round(median([rate(run, kind) for run in good])) for kind, name in kinds}
    peaks = {"peak_rss_mib": "peak_rss_bytes", "allocated_mib": "allocated_bytes", "reserved_mib": "reserved_bytes"}
    mib = {name: round(max(run[key] for run in good) / 2**20) for name, key in peaks.items() if key in good[0]}
    return {
        **row, "version": good[0]["version"], "device": good[0]["device"], "rounds": len(good),
        "first_step_s": round(median([run["first_step_s"] for run in good]), 1),
        **{f"{name}_tokens_per_s": value for name, value in tokens.items()}, **mib, "ratio": round(median(ratios), 3),
        "least_ratio": round(min(ratios), 3), "most_ratio": round(max(ratios), 3),
        "first_loss": round(good[0]["losses"][0], 4), "last_loss": round(good[0]["losses"][-1], 4),
        "loss_difference": round(difference, 4), "failed": why,
    }  # fmt: skip


def compared(peer: dict[str, Any], own: dict[str, Any]) -> tuple[float, str]:
    """Mean difference of the losses of two runs as a share, and why the first has failed; empty when it has not."""
    if len(peer["losses"]) < len(own["tokens"]):
        return 0.0, f"{len(peer['losses'])} steps in place of {len(own['tokens'])}"
    shares = [abs(a / b - 1) for a, b in zip(peer["losses"], own["losses"], strict=False)]
    supervised = [sum(counts[0] for counts in run["tokens"]) for run in (peer, own)]
    if abs(supervised[0] / supervised[1] - 1) > TOLERANCE["first"]:
        return statistics.mean(shares), f"trained on {supervised[0]:,} tokens, not {supervised[1]:,}"
    if shares[0] > TOLERANCE["first"]:
        return statistics.mean(shares), f"first loss {peer['losses'][0]:.4f}, not {own['losses'][0]:.4f}"
    if statistics.mean(shares) > TOLERANCE["run"]:
        return statistics.mean(shares), f"losses differ by {statistics.mean(shares):.1%}"
    return statistics.mean(shares), ""


if __name__ == "__main__":
    sys.exit(main())
