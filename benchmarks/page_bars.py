"""The page's bars by one command, each beside what is measured here: python benchmarks/page_bars.py [--edits 200]

Choices lost of random edits; a verdict's time on the page by the planner's; bytes and growth of a live tick; the first view of
each page, and again; how far it moves; screens of a phone; memory of server and tab over 3,600 ticks, and its main thread;
figures without a value. All are ratios, shares or counts. Prints a line for each and returns 1 when one is missed. Starts
`finetune ui` in empty folders; Chromium.
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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

import app_ticks
import first_view
from app.planning.process import Questions
from finetune.events import Checkpoint, Evaluation, EventWriter, Phase, Start, State
from finetune.files import write_json
from finetune.run.directory import RunDirectory
from finetune.run.state import process_record
from page_edits import FIRST
from screenshots import ARGUMENTS, page_started

PAGES = ("", "model", "data", "fit", "runs")
_RANKS = (20, 28, 36, 44, 52)
_PHONE = {"width": 390, "height": 844}
_TICKS, _WARM_TICKS = 3600, 300
#: A twentieth of what the page took when its charts were drawn by Plotly, in Gradio: 28 % of a core.
_MOST_BUSY = 0.05 * 0.28
#: Cells of a page that show no value.
_DASHES = "[...document.querySelectorAll('td, dd')].filter((cell) => /^[-–—]$/.test(cell.textContent.trim())).length"
Bar = tuple[str, float, float]


def main() -> int:
    """Measure and print; returns 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    is_missed = False
    for name, value, most in _bars(chosen.edits, chosen.seed):
        is_missed = is_missed or value > most
        print(f"{name:58} {value:>12,.3f} {most:>12,.3f}  {'MISSED' if value > most else 'ok'}", flush=True)
    return int(is_missed)


def _bars(edits: int, seed: int) -> Iterator[Bar]:
    yield _lost_choices(edits, seed)
    yield from _ticks()
    with tempfile.TemporaryDirectory() as folder:
        yield from _in_chromium(Path(folder))


def _lost_choices(edits: int, seed: int) -> Bar:
    script = Path(__file__).with_name("page_edits.py")
    command = [sys.executable, str(script), "--edits", str(edits), "--seed", str(seed)]
    result = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    return f"choices lost, of {sum(result['edits'].values())} random edits", len(result["problems"]), 0


def _ticks() -> Iterator[Bar]:
    costs = []
    for steps in (1_000, 1_000_000):
        with tempfile.TemporaryDirectory() as folder:
            costs.append(app_ticks.measure(Path(folder), steps))
        yield f"bytes of a live tick at {steps:,} steps, median", costs[-1]["tick_bytes_median"], 4096
    yield "a tick at 1,000,000 steps / at 1,000", costs[1]["chart_cpu_ms_median"] / costs[0]["chart_cpu_ms_median"], 1.2


def _in_chromium(folder: Path) -> Iterator[Bar]:
    from playwright.sync_api import sync_playwright

    _write_run(RunDirectory(folder / "runs" / "measured"))
    with page_started(folder) as link, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium") or None, args=ARGUMENTS)
        views = [first_view.view(browser, link, page) for page in (*PAGES, "run")]
        for name, most in first_view.BARS.items():
            yield f"first view, the most of {len(views)} pages: {name.replace('_', ' ')}", max(v[name] for v in views), most
        draft = folder / "runs/.app/draft/recipe.yaml"
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(FIRST)
        address, _, query = link.partition("?")
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        tab = context.new_page()
        tab.goto(f"{address.rstrip('/')}/fit?{query}")
        yield "time for a new verdict / the planner's", _verdict_s(tab) / _planner_s(), 1.5
        phone = context.new_page()
        phone.set_viewport_size(_PHONE)
        for page, screens in (("run?run=measured", 3), ("fit", 4)):
            phone.goto(f"{address.rstrip('/')}/{page}")
            phone.wait_for_timeout(5000)
            height = phone.evaluate("document.documentElement.scrollHeight") / _PHONE["height"]
            yield f"screens of a phone: {page.partition('?')[0]}", height, screens
        for page in ("run?run=measured", "model"):
            tab.goto(f"{address.rstrip('/')}/{page}")
            tab.wait_for_timeout(4000)
            yield f"figures without a value: {page.partition('?')[0]}", tab.evaluate(_DASHES), 0
        yield from _many_ticks(tab, folder, address.rstrip("/"))
        browser.close()


def _verdict_s(tab: Any) -> float:
    """Median seconds from a typed rank to its plan on the page, after a first one."""
    tab.wait_for_selector("#fit-verdict .ft-verdict", timeout=120_000)
    times = []
    for rank in (16, *_RANKS):
        box = tab.locator("#fit-rank input[type=number]")
        box.fill(str(rank))
        began = time.perf_counter()
        box.press("Enter")
        tab.wait_for_function(
            """(rank) => {
                const text = (name) => document.querySelector(`#fit-${name}`).textContent;
                return text("asked") === text("answered") && text("reasons").includes(`rank ${rank}`);
            }""",
            arg=rank, timeout=60_000,
        )  # fmt: skip
        times.append(time.perf_counter() - began)
        tab.wait_for_selector("body:not([data-planning])", timeout=120_000)
    return statistics.median(times[1:])


def _planner_s() -> float:
    """Median seconds of the same plans by the planner alone."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FINETUNE_CACHE"] = cache
        questions, times = Questions(), []
        for rank in (16, *_RANKS):
            recipe = FIRST.replace("lora_r: 16", f"lora_r: {rank}")
            began = time.perf_counter()
            questions.answer({"kind": "plan", "recipe": recipe, "compare": False})
            times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _write_run(run: RunDirectory) -> None:
    """A run of 300 of 600 steps that is alive: this process is its worker."""
    run.path.mkdir(parents=True)
    write_json(run.plan, app_ticks.plan(600).as_json())
    write_json(run.process, {"worker": process_record(os.getpid())})
    writer, chance = EventWriter(run.events), random.Random(1)
    writer.emit(Start(total_steps=600, memory_is="card"))
    writer.emit(State(state="running"))
    writer.emit(Phase(phase="load", phase_s=9.0, peak_allocated_bytes=5 * 2**30, peak_reserved_bytes=6 * 2**30))
    for step in range(1, 301):
        writer.emit(app_ticks.step_event(step, 600, chance))
        if step % 100 == 0:
            writer.emit(Evaluation(step=step, eval_loss=1 / step, eval_s=4.0))
            writer.emit(Checkpoint(step=step, path=f"checkpoint-{step}", bytes=2**20, save_s=0.1))


def _many_ticks(tab: Any, folder: Path, address: str) -> Iterator[Bar]:
    """A run's open page over 3,600 ticks, a new step with each: memory of server and tab, and the tab's main thread."""
    (server,) = [child for child in psutil.Process().children() if "app" in child.cmdline()]
    run, chance = RunDirectory(folder / "runs" / "measured"), random.Random(2)
    writer, protocol = EventWriter(run.events), tab.context.new_cdp_session(tab)
    protocol.send("Performance.enable")
    tab.goto(f"{address}/run?run=measured")
    tab.wait_for_function("document.querySelector('ft-chart')?.charts?.length")
    measured: dict[int, tuple[float, float, float]] = {}
    for tick in range(1, _TICKS + 1):
        writer.emit(app_ticks.step_event(300 + tick, 600 + _TICKS, chance))
        tab.evaluate("document.querySelector('ft-chart').poll()")
        if tick in (_WARM_TICKS, _TICKS):
            protocol.send("HeapProfiler.collectGarbage")
            values = {metric["name"]: metric["value"] for metric in protocol.send("Performance.getMetrics")["metrics"]}
            measured[tick] = server.memory_info().rss, values["JSHeapUsedSize"], values["TaskDuration"]
    (server_warm, tab_warm, busy_s), (server_bytes, tab_bytes, busy_end_s) = measured[_WARM_TICKS], measured[_TICKS]
    yield "the server's memory after 3,600 ticks / after 300", server_bytes / server_warm, 1.1
    yield "the tab's memory after 3,600 ticks / after 300", tab_bytes / tab_warm, 1.1
    yield "main thread, of a core, at a tick a second", (busy_end_s - busy_s) / (_TICKS - _WARM_TICKS), _MOST_BUSY


if __name__ == "__main__":
    sys.exit(main())
