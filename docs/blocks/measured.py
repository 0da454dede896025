"""Blocks of forecasts beside measurements: benchmarks/forecast_accuracy.py and benchmarks/gpu."""

from __future__ import annotations

import csv
import functools
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

from blocks.page import GIB, ROOT, block, markdown

PEERS = ROOT / "benchmarks" / "reference" / "peers.csv"
BENCHMARK, MEASURED = ROOT / "benchmarks" / "forecast_accuracy.py", ROOT / "benchmarks" / "reference" / "measured_memory.csv"


def accuracy(table: Path = MEASURED) -> str:
    """The results of benchmarks/forecast_accuracy.py for `table`: a row for each measurement, and the summary."""
    command = [sys.executable, "-W", "ignore", str(BENCHMARK), str(table), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    *made, summary = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    with table.open(newline="", encoding="utf-8") as file:
        known = {row["url_or_path"]: row for row in csv.DictReader(file)}
    columns = ("model", "base", "attention", ">rank", ">rows x tokens", ">measured, GiB", ">forecast, GiB", ">error")
    rows = markdown(columns, [_accuracy_row(known[row["row"]], row) for row in made])
    return f"{rows}\n{summary['rows']} rows: mean |error| {_percent(summary['mean_absolute_error'])}, " + (
        f"worst {_percent(summary['worst_error'], '+')}.\n"
    )


def _accuracy_row(known: dict[str, str], made: dict) -> list[str]:
    return [
        known["model"].rpartition("/")[2], known["quant"].split()[0], known["attn"].split()[0], known["rank"],
        f"{known['micro_batch']} x {known['seq_len']}", f"{made['measured_bytes'] / GIB:.3f}",
        f"{made['predicted_bytes'] / GIB:.3f}", _percent(made["error"], "+"),
    ]  # fmt: skip


def reserved(table: Path = MEASURED) -> str:
    """The results of benchmarks/reserved_accuracy.py for `table`: mean and worst errors of both metrics by kind of weights."""
    command = [sys.executable, "-W", "ignore", str(BENCHMARK.with_name("reserved_accuracy.py")), str(table), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    *made, _ = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    with table.open(newline="", encoding="utf-8") as file:
        base = {row["url_or_path"]: row["quant"].split()[0] for row in csv.DictReader(file)}
    kinds = [("all", made), *((kind, [row for row in made if base[row["row"]] == kind]) for kind in ("none", "nf4"))]
    columns = ("base", ">rows", ">allocated, mean", ">worst", ">reserved, mean", ">worst", ">within 2 %")
    return markdown(columns, [_replay_row(kind, rows) for kind, rows in kinds if rows])


def _replay_row(kind: str, rows: list[dict]) -> list[object]:
    cells: list[object] = [kind, len(rows)]
    for name in ("allocated_error", "reserved_error"):
        errors = [row[name] for row in rows]
        cells += [_percent(sum(map(abs, errors)) / len(errors)), _percent(max(errors, key=abs), "+")]
    return [*cells, sum(abs(row["reserved_error"]) <= 0.02 for row in rows)]


def _percent(value: float, sign: str = "") -> str:
    return f"{value:{sign}.2%}".replace("%", " %")


def accuracy_short(text: str = "{rows} measurements by others on a Tesla T4: mean error {mean}, worst {worst}.") -> str:
    """The summary line, from the page."""
    last = block("docs/accuracy.md", "accuracy").strip().splitlines()[-1]
    found = re.fullmatch(r"(?P<rows>\d+) rows: mean \|error\| (?P<mean>\S+ %), worst (?P<worst>\S+ %)\.", last)
    assert found is not None, last
    return f"{text.format(**found.groupdict())}\n"


@functools.cache
def _gpu() -> dict[str, typing.Any]:
    """What benchmarks/gpu/report.py makes of the results file."""
    command = [sys.executable, "-m", "benchmarks.gpu.report"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    return json.loads(done.stdout)


def gpu() -> str:
    """The cells of benchmarks/gpu, measured on a card."""
    report = _gpu()
    first, *others = report["columns"]
    return markdown((first, *(f">{column}" for column in others)), report["rows"])


def gpu_short(
    text: str = "On {cards}, {runs} runs: allocated memory forecast with a mean error of {mean}, worst {worst}.",
    none: str = "No NVIDIA card was available while this was written: nothing is measured on one.",
) -> str:
    """The summary of the runs on a card."""
    report = _gpu()
    return f"{text.format(**{**report, 'cards': ', '.join(report['cards'])}) if report['runs'] else none}\n"


def peers(table: Path = PEERS) -> str:
    """The results of benchmarks/peers.py: a row for each tool, with why where one could not be run."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = (
        "tool", ">real tokens/s", ">beside finetune", ">supervised", ">with padding", ">first step, s", ">peak memory, MiB",
        ">loss", ">difference", "failed",
    )  # fmt: skip
    return markdown(columns, [_peer_row(row) for row in rows])


def _peer_row(row: dict[str, str]) -> list[str]:
    if not row["version"]:
        return [row["peer"], *["-"] * 8, row["failed"]]
    speeds = [f"{int(row[f'{kind}_tokens_per_s']):,}" for kind in ("real", "supervised", "padded")]
    ratio = f"{float(row['ratio']):.2f} x ({float(row['least_ratio']):.2f} to {float(row['most_ratio']):.2f})"
    return [
        f"{row['peer']} {row['version']}", speeds[0], ratio, *speeds[1:], row["first_step_s"],
        row["allocated_mib"] or row["peak_rss_mib"], f"{row['first_loss']} to {row['last_loss']}",
        _percent(float(row["loss_difference"])), row["failed"] or "-",
    ]  # fmt: skip
