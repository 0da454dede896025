"""Processor seconds of `finetune plan` from an empty cache and from a warm one, until its verdict and in all.

    python benchmarks/cold_plan.py --rounds 5

Target: 5 s for recipes/8b-3090.yaml from an empty cache. Importing torch takes 1.7 of them here. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from finetune.planner.plan import Verdict

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Print the medians as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="8b-3090")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds = [plan_twice(options.recipe) for _ in range(options.rounds)]
    medians = {name: round(statistics.median(seconds[name] for seconds in rounds), 2) for name in rounds[0]}
    print(json.dumps({"rounds": len(rounds), **medians}))


def plan_twice(recipe: str) -> dict[str, float]:
    """Processor seconds of a plan from an empty cache and of the same plan again."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "FINETUNE_CACHE": folder, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        cold_verdict_s, cold_s = _plan(recipe, environment)
        _, warm_s = _plan(recipe, environment)
    return {"cold_verdict_s": cold_verdict_s, "cold_s": cold_s, "warm_s": warm_s}


def _plan(recipe: str, environment: dict[str, str]) -> tuple[float, float]:
    """Processor seconds until the verdict is printed, and in all."""
    command = [sys.executable, "-u", "-m", "finetune", "plan", recipe]
    verdict_s = 0.0
    with subprocess.Popen(
        command, env=environment, cwd=environment["FINETUNE_CACHE"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        for line in process.stdout:
            if line.startswith(tuple(str(verdict).encode() for verdict in Verdict)):
                ticks = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[11:13]
                verdict_s = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0
    return verdict_s, used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
