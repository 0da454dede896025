"""The first minute on each stand-in GPU, as typed: doctor, plan, run, stop, resume, eval, chat, merge, the page.

    .venv-card-*/bin/python -m benchmarks.card_first_minute [--gpus rtx-3060 t4 ...] [--again]

The bundled model trains in 16 bit. No kernel runs, so this shows what crashes, refuses or warns, and not how fast anything is.
Results go to benchmarks/reference/card_first_minute.csv: for each GPU and command its exit code, or what it said.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from benchmarks.card_matrix import restart_with_libraries
from standin_gpu.machine import Machine, describe, read_catalogue

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "reference" / "card_first_minute.csv"
#: Machines by their GPUs.
MACHINES = (
    "rtx-3060", "rtx-3090", "rtx-4060", "rtx-4060-ti-16gb", "rtx-4070", "rtx-4080", "rtx-4090", "rtx-4090-laptop", "rtx-5060",
    "rtx-5090", "t4", "a10", "l4", "a100-40gb", "h100-80gb", "h200", "b200", "rtx-3090 + rtx-3060",
)  # fmt: skip
RUN = [
    "tiny-cpu", "gpu=auto", "max_steps=100", "eval_steps=50", "save_steps=2", "dataset.max_rows=64", "output_dir=run",
]  # fmt: skip
COMMANDS: dict[str, list[str]] = {
    "doctor": ["doctor", "--json"],
    "plan": ["plan", "tiny-cpu", "gpu=auto"],
    "run": ["run", *RUN],  # stopped after its first checkpoint
    "resume": ["resume", "run"],
    "eval": ["eval", "run", "--rows", "4"],
    "chat": ["chat", "run", "--prompt", "Where is my parcel?"],
    "merge": ["merge", "run", "--output", "merged"],
}
#: Servers with the path that answers without a token.
SERVERS = {"page": (["ui", "--port", "0"], "/healthz")}
COLUMNS = ("gpu", *COMMANDS, *SERVERS, "memory", "seconds")
#: Doctor's checks that look at what kernels compute.
WITH_KERNELS = ("bitsandbytes", "triton")
_ADDRESS = re.compile(r"http://(127\.0\.0\.1:\d+)(/\?token=\S+)?")


def main() -> int:
    """Try the machines that are missing in the results; the exit status is 1 where a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="*", default=list(MACHINES), help="names of the catalogue; 'a + b' is one machine")
    parser.add_argument("--again", action="store_true", help="also machines that are in the results")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    restart_with_libraries("benchmarks.card_first_minute")
    results = {} if options.again else read_results(options.output)
    for name in options.gpus:
        if name not in results:
            results[name] = first_minute(name)
            with options.output.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(results.values())
            print(", ".join(f"{column} {value}" for column, value in results[name].items()), flush=True)
    failed = [f"{name}: {column}" for name, line in results.items() for column in (*COMMANDS, *SERVERS) if line[column] != "ok"]
    print(f"{len(results)} machines, {len(failed)} failures", *failed, sep="\n  ")
    return 1 if failed else 0


def first_minute(name: str) -> dict[str, str]:
    """The line of a machine."""
    began = time.monotonic()
    gpus = read_catalogue(ROOT / "finetune" / "card" / "cards.json")
    line = {"gpu": name}
    with tempfile.TemporaryDirectory(prefix="first_minute_") as text:
        folder = Path(text)
        machine = Machine(Path(sys.prefix) / "standin_libraries", folder, describe(name.split(" + "), gpus))
        machine.environment |= {
            "PYTHONPATH": str(ROOT), "FINETUNE_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "hub"),
            "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        for command, arguments in COMMANDS.items():
            if command == "run":
                line[command] = _stopped_run(machine, arguments, folder)
                continue
            result = machine.run(sys.executable, "-m", "finetune", *arguments, check=False, cwd=folder)
            line[command] = _diagnosis(result) if command == "doctor" else _outcome(result)
        for command, (arguments, path) in SERVERS.items():
            line[command] = _answers(machine, arguments, path, folder)
        holders = [pid for number in range(2) for pid in machine.used_bytes(number) if Path(f"/proc/{pid}").exists()]
        line["memory"] = "still in use" if holders else "free"
    return line | {"seconds": f"{time.monotonic() - began:.0f}"}


def _stopped_run(machine: Machine, arguments: list[str], folder: Path) -> str:
    """Whether a run trains up to its first checkpoint and then stops as asked."""
    command = [sys.executable, "-m", "finetune"]
    training = machine.start(*command, *arguments, cwd=folder, stdin=subprocess.DEVNULL)
    while training.poll() is None and not list((folder / "run" / "checkpoints").glob("checkpoint-*")):
        time.sleep(0.1)
    machine.run(*command, "pause", "run", check=False, cwd=folder)
    output, errors = training.communicate()
    expected = 128 + signal.SIGTERM
    if training.returncode == expected:
        return "ok"
    return _outcome(subprocess.CompletedProcess([], training.returncode or expected, output, errors))


def _diagnosis(result: subprocess.CompletedProcess[str]) -> str:
    """What doctor finds wrong beside kernels that compute nothing."""
    findings = json.loads(result.stdout)["findings"]
    return "; ".join(f["what"] for f in findings if f["state"] == "fail" and f["check"] not in WITH_KERNELS) or "ok"


def _outcome(result: subprocess.CompletedProcess[str]) -> str:
    if result.returncode == 0:
        return "ok"
    lines = [text for text in (result.stdout + result.stderr).splitlines() if text.strip()]
    return f"exit {result.returncode}: {' '.join(lines[-3:])[:200]}"


def _answers(machine: Machine, arguments: list[str], path: str, folder: Path) -> str:
    """Whether a server prints its address and answers there; it is ended afterwards."""
    server = machine.start(sys.executable, "-u", "-m", "finetune", *arguments, cwd=folder, stderr=subprocess.STDOUT)
    output = []
    try:
        for text in server.stdout or ():
            output.append(text.strip())
            if address := _ADDRESS.search(text):
                with urllib.request.urlopen(f"http://{address[1]}{path}", timeout=60) as answer:
                    return "ok" if answer.status == 200 else f"status {answer.status}"
        return f"exit {server.wait()}: {' '.join(output[-3:])[:200]}"
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        server.terminate()
        server.communicate()


def read_results(path: Path) -> dict[str, dict[str, str]]:
    """Lines of earlier results by machine."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {line["gpu"]: line for line in csv.DictReader(file)}


if __name__ == "__main__":
    sys.exit(main())
