"""Cost of an update (tick) of the run page for runs of 1,000 to 1,000,000 steps: `python benchmarks/app_ticks.py [STEPS ...]`.

Writes events as a run does (11 steps between two ticks), then measures what the one request of a tick costs: reading new
events, the chart's points, and the parts of the page that changed. Limits of a tick, whatever the length of the run: 50 ms of
CPU time, 4 kB in the median. A chart's answer at the greatest length takes at most 1.2 times what it takes at the least:
medians of CPU time, so that the load of the machine does not count. Prints one line of JSON for each length.
"""

from __future__ import annotations

import json
import math
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from app.live import LiveRun
from app.views.chart_series import answer, zoomed
from app.views.run_page import changed
from finetune.card.card import Card
from finetune.events import EventWriter, Step, event_json
from finetune.files import write_json
from finetune.memory.forecast import Forecast
from finetune.planner.plan import DataStatistics, Plan, Verdict
from finetune.recipe import load_recipe
from finetune.run.directory import RunDirectory
from finetune.settings import plainest

TICKS, NEW_STEPS = 60, 11
#: Bins that a wide chart asks for.
POINTS = 400
GIB = 2**30


def main() -> int:
    """Measure each length; returns 1 when a limit is exceeded."""
    broken, chart_ms = False, []
    for steps in [int(text) for text in sys.argv[1:]] or [1_000, 10_000, 100_000, 1_000_000]:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(Path(folder), steps)
        print(json.dumps(result), flush=True)
        chart_ms.append(result["chart_cpu_ms_median"])
        broken = broken or result["tick_cpu_ms_p95"] > 50 or result["tick_bytes_median"] > 4096
    growth = chart_ms[-1] / chart_ms[0]
    print(json.dumps({"chart_time_longest_by_shortest": round(growth, 2)}))
    return 1 if broken or growth > 1.2 else 0


def measure(folder: Path, steps: int) -> dict[str, Any]:
    """Cost of ticks at the end of a run of `steps` steps, and of opening it for the first time and again."""
    run = RunDirectory(folder / "run")
    run.path.mkdir()
    write_json(run.plan, plan(steps).as_json())
    (run.log).write_text("a line of the log\n" * 2000)
    writer, chance = EventWriter(run.events), random.Random(1)
    lines = [json.dumps(event_json(step_event(step, steps, chance))) + "\n" for step in range(1, steps + 1)]
    with run.events.open("a") as file:
        file.writelines(lines)
    live = LiveRun(run, folder / "kept.json")
    began = time.perf_counter()
    while not live.refresh():
        time.sleep(0.01)
    first_s = time.perf_counter() - began
    begun_cpu = time.process_time()
    opened = answer(live, None, POINTS)
    first = {
        "chart_first_bytes": len(json.dumps(opened, separators=(",", ":"))),
        "chart_first_ms": 1000 * (time.process_time() - begun_cpu),
    }
    began = time.perf_counter()
    zoomed(live, steps // 2, steps // 2 + 5000, POINTS)
    first["chart_zoom_ms"] = 1000 * (time.perf_counter() - began)
    version = version_of(opened)
    costs, cpu, sizes, chart_cpu, chart_sizes = [], [], [], [], []
    shown: dict[str, str] = {}
    for tick in range(TICKS):
        for number in range(NEW_STEPS):
            writer.emit(step_event(steps + tick * NEW_STEPS + number + 1, steps + TICKS * NEW_STEPS, chance))
        began, began_cpu = time.perf_counter(), time.process_time()
        live.refresh()
        chart_began = time.process_time()
        news = answer(live, version, POINTS)
        chart_sizes.append(len(json.dumps(news, separators=(",", ":"))))
        chart_cpu.append(1000 * (time.process_time() - chart_began))
        version = version_of(news)
        parts = changed(live, "overview", shown.values())
        shown |= {name: stamp for name, (stamp, _) in parts.items()}
        cpu.append(1000 * (time.process_time() - began_cpu))
        costs.append(1000 * (time.perf_counter() - began))
        sizes.append(chart_sizes[-1] + len(json.dumps(parts, ensure_ascii=False, separators=(",", ":")).encode()))
    began = time.perf_counter()
    reopened = LiveRun(run, folder / "kept.json")
    while not reopened.refresh():
        time.sleep(0.01)
    return {
        "steps": steps, "events_bytes": run.events.stat().st_size, "tick_cpu_ms_p95": round(sorted(cpu)[int(0.95 * TICKS)], 1),
        "tick_ms_median": round(statistics.median(costs), 1),
        "tick_ms_p95": round(sorted(costs)[int(0.95 * TICKS)], 1),
        "tick_bytes_median": round(statistics.median(sizes)), "tick_bytes_max": max(sizes),
        "chart_bytes_median": round(statistics.median(chart_sizes)),
        "chart_bytes_max": max(chart_sizes), "chart_cpu_ms_median": round(statistics.median(chart_cpu), 2),
        **{name: round(value) for name, value in first.items()},
        "first_open_s": round(first_s, 2),
        "open_again_s": round(time.perf_counter() - began, 2),
        "process_peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip


def version_of(news: dict[str, Any]) -> tuple[str, int, int]:
    """The version of a chart's answer, as the next one asks for it."""
    name, number, checksum = news["version"].split("-")
    return name, int(number), int(checksum)


def step_event(step: int, total: int, chance: random.Random) -> Step:
    """An event with every metric of a run on a card."""
    loss = 3 * math.exp(-3 * step / total) + chance.random() / 5 + (3.0 if step % 9973 == 0 else 0.0)
    return Step(
        step=step, total_steps=total, epoch=step / total, loss=loss, learning_rate=2e-4 * (1 - step / total),
        grad_norm=1 + chance.random(), token_accuracy=0.5 + chance.random() / 3, tokens_per_s=3000 + 200 * chance.random(),
        step_s=0.5 + chance.random() / 50, allocated_bytes=9 * GIB, peak_allocated_bytes=10 * GIB + chance.randrange(GIB),
        peak_reserved_bytes=11 * GIB + chance.randrange(GIB // 4), card_used_bytes=12 * GIB + chance.randrange(GIB // 4),
        other_processes_bytes=GIB, process_rss_bytes=3 * GIB, temperature_c=60 + chance.randrange(10),
        power_w=300 + 20 * chance.random(),
    )  # fmt: skip


def plan(steps: int) -> Plan:
    """A plan for a 24 GiB card, with a forecast for the charts."""
    parts = {"weights": 5 * GIB, "adapters": GIB // 8, "optimizer": GIB // 2, "activations": 4 * GIB, "loss": GIB}
    phases = {"load": 6 * GIB, "train": 10 * GIB}
    peaks = (10 * GIB, 11 * GIB, 12 * GIB, 11 * GIB, 13 * GIB)
    forecast = Forecast(*peaks, parts, phases, step_s=0.5, tokens_per_s=3100.0)
    card = Card("rtx-4090", 24 * GIB, 23 * GIB, (8, 9), context_bytes=GIB // 2)
    recipe = load_recipe("tiny-cpu", ["lora_r=1", "load_in_4bit=false"])
    settings = plainest(recipe, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    rows = DataStatistics(rows=24, eval_rows=6, total_tokens=2367, trained_tokens=934)
    return Plan(settings, {}, card, Verdict.FITS, steps, forecast, rows, budget_bytes=22 * GIB)


if __name__ == "__main__":
    sys.exit(main())
