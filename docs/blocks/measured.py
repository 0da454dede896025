"""Blocks of forecasts beside measurements: benchmarks/forecast_accuracy.py and benchmarks/gpu."""

from __future__ import annotations

import collections
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

from finetune.planner.plan import Verdict

PEERS = ROOT / "benchmarks" / "reference" / "peers.csv"
CARD_PEERS = ROOT / "benchmarks" / "reference" / "card_peers.csv"
GPU_DAY = ROOT / "benchmarks" / "reference" / "gpu_day.csv"
STAND_IN = ROOT / "benchmarks" / "reference" / "card_matrix.csv"
STAND_IN_EDGE = ROOT / "benchmarks" / "reference" / "card_edge.csv"
STAND_IN_KERNELS = ROOT / "benchmarks" / "reference" / "card_kernels.csv"
STAND_IN_END = ROOT / "benchmarks" / "reference" / "card_end.csv"
#: What differs among the budgets at one end of a forecast.
_END_OFFSET = re.compile(r" [+-]\d+ MiB$")
BENCHMARK, MEASURED = ROOT / "benchmarks" / "forecast_accuracy.py", ROOT / "benchmarks" / "reference" / "measured_memory.csv"


def accuracy(table: Path = MEASURED) -> str:
    """The results of benchmarks/forecast_accuracy.py for `table`: a row for each measurement, and the summary."""
    command = [sys.executable, "-W", "ignore", str(BENCHMARK), str(table), "--json"]
    process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    *forecasts, summary = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    with table.open(newline="", encoding="utf-8") as file:
        measured = {row["url_or_path"]: row for row in csv.DictReader(file)}
    columns = ("model", "base", "attention", ">rank", ">rows x tokens", ">measured, GiB", ">forecast, GiB", ">error")
    rows = markdown(columns, [_accuracy_row(measured[row["row"]], row) for row in forecasts])
    return f"{rows}\n{summary['rows']} rows: mean |error| {_percent(summary['mean_absolute_error'])}, " + (
        f"worst {_percent(summary['worst_error'], '+')}.\n"
    )


def speed() -> str:
    """The results of benchmarks/speed_accuracy.py, and its summary without what was fitted."""
    command = [sys.executable, "-W", "ignore", str(BENCHMARK.with_name("speed_accuracy.py"))]
    fitted, published = (
        subprocess.run([*command, *option], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
        for option in ([], ["--published-rates"])
    )
    before = published.rpartition("\n\n")[2]
    return f"{fitted}\n\nWithout what was fitted to these rows:\n\n{before}\n"


def _accuracy_row(row: dict[str, str], forecast: dict) -> list[str]:
    return [
        row["model"].rpartition("/")[2], row["quant"].split()[0], row["attn"].split()[0], row["rank"],
        f"{row['micro_batch']} x {row['seq_len']}", f"{forecast['measured_bytes'] / GIB:.3f}",
        f"{forecast['predicted_bytes'] / GIB:.3f}", _percent(forecast["error"], "+"),
    ]  # fmt: skip


def reserved(table: Path = MEASURED) -> str:
    """The results of benchmarks/reserved_accuracy.py for `table`: mean and worst errors of both metrics by kind of weights."""
    command = [sys.executable, "-W", "ignore", str(BENCHMARK.with_name("reserved_accuracy.py")), str(table)]
    process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    rows = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    with table.open(newline="", encoding="utf-8") as file:
        base = {row["url_or_path"]: row["quant"].split()[0] for row in csv.DictReader(file)}
    kinds = [("all", rows), *((kind, [row for row in rows if base[row["row"]] == kind]) for kind in ("none", "nf4"))]
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
    match = re.fullmatch(r"(?P<rows>\d+) rows: mean \|error\| (?P<mean>\S+ %), worst (?P<worst>\S+ %)\.", last)
    assert match is not None, last
    return f"{text.format(**match.groupdict())}\n"


@functools.cache
def _gpu() -> dict[str, typing.Any]:
    """What benchmarks/gpu/report.py makes of the results file."""
    command = [sys.executable, "-m", "benchmarks.gpu.report"]
    process = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    return json.loads(process.stdout)


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


def gpu_day() -> str:
    """Whole runs of Llama-3.1-8B's shape on an H200, beside other programs."""
    with GPU_DAY.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = ("program", "recomputed", ">tokens a step", ">forecast, bytes", ">measured, bytes", ">s a step", ">tokens/s")
    return markdown(columns, [_gpu_day_row(row) for row in rows])


def _gpu_day_row(row: dict[str, str]) -> list[str]:
    sizes = [f"{int(row[name]):,}" if row[name] else "-" for name in ("tokens", "forecast_bytes", "allocated_bytes")]
    step_s = float(row["step_s"])
    return [row["program"], row["recomputed"], *sizes, f"{step_s:.3f}", f"{int(row['tokens']) / step_s:,.0f}"]


def gpu_day_short(
    text: str = "Llama-3.1-8B's shape in NF4, 32 layers, on an H200: {forecast} bytes forecast, {measured} measured, {error}.",
) -> str:
    """The first row with a forecast, in a sentence."""
    with GPU_DAY.open(newline="", encoding="utf-8") as file:
        row = next(csv.DictReader(file))
    forecast, measured = int(row["forecast_bytes"]), int(row["allocated_bytes"])
    error = f"{abs(forecast / measured - 1):.4%}".replace("%", " %")
    return f"{text.format(measured=f'{measured:,}', forecast=f'{forecast:,}', error=error)}\n"


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


@functools.cache
def _stand_in_lines(table: Path = STAND_IN) -> list[dict[str, str]]:
    """Lines of benchmarks/card_matrix.py whose run ended and whose phase has a forecast."""
    with table.open(newline="", encoding="utf-8") as file:
        return [line for line in csv.DictReader(file) if line["exit_code"] == "0" and line["forecast_allocated_bytes"]]


def _errors(lines: list[dict[str, str]], kind: str) -> list[float]:
    """measured / forecast - 1 of `allocated` or `reserved` bytes, where both are known."""
    pairs = [(line[f"measured_{kind}_bytes"], line[f"forecast_{kind}_bytes"]) for line in lines]
    return [int(measured) / int(forecast) - 1 for measured, forecast in pairs if measured and forecast]


def stand_in() -> str:
    """The results of benchmarks/card_matrix.py: errors by phase, and by what can make reserved memory differ."""
    lines = _stand_in_lines()
    kinds: list[tuple[str, list[dict[str, str]]]] = [
        (f"{phase}, {segments}", [line for line in lines if (line["phase"], line["segments"]) == (phase, kind)])
        for kind, segments in (("expandable", "segments expand"), ("segments", "segments can't expand (Windows, WSL)"))
        for phase in ("load", "train", "eval", "save")
    ]
    columns = (
        "phase", ">runs", ">allocated: mean", ">worst", ">within 0.1 %", ">reserved: mean", ">worst", ">within 1 %",
    )  # fmt: skip
    return markdown(columns, [_stand_in_row(name, chosen) for name, chosen in kinds if chosen])


def _stand_in_row(name: str, lines: list[dict[str, str]]) -> list[object]:
    row: list[object] = [name, len(lines)]
    for kind, least in (("allocated", 0.001), ("reserved", 0.01)):
        errors = _errors(lines, kind)
        mean = sum(map(abs, errors)) / len(errors)
        within = sum(abs(error) <= least for error in errors)
        row += [f"{mean:.3%}".replace("%", " %"), _percent(max(errors, key=abs), "+"), f"{within} of {len(errors)}"]
    return row


def stand_in_models() -> str:
    """What was run, and the training step's errors by model and format."""
    lines = [line for line in _stand_in_lines() if line["phase"] == "train"]
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for line in lines:
        groups.setdefault((line["model"], line["base_format"]), []).append(line)
    columns = ("model", "base", "GPUs", ">runs", ">allocated: worst", ">reserved: worst", ">reserved, GiB")
    rows = []
    for (model, base_format), chosen in groups.items():
        gpus = ", ".join(dict.fromkeys(line["gpu"] for line in chosen))
        reserved_gib = [int(line["measured_reserved_bytes"]) / GIB for line in chosen]
        worst = [
            _percent(max(errors, key=abs), "+") if (errors := _errors(chosen, kind)) else "-"
            for kind in ("allocated", "reserved")
        ]
        rows.append(
            [
                model.rpartition("/")[2],
                base_format,
                gpus,
                len(chosen),
                *worst,
                f"{min(reserved_gib):.1f} to {max(reserved_gib):.1f}",
            ]
        )
    return markdown(columns, rows)


def stand_in_short(
    text: str = "{runs} whole runs on stand-in GPUs, where torch's own allocator allocates and no kernel computes: allocated "
    "memory of a training step differs by {mean} on average, {worst} at worst; reserved by {reserved_mean}, {reserved_worst}.",
) -> str:
    """The summary of the runs on stand-in GPUs."""
    lines = [line for line in _stand_in_lines() if line["phase"] == "train"]
    allocated, reserved = _errors(lines, "allocated"), _errors(lines, "reserved")
    values = {
        "runs": len(lines), "mean": f"{sum(map(abs, allocated)) / len(allocated):.3%}".replace("%", " %"),
        "worst": _percent(max(allocated, key=abs), "+"), "reserved_mean": _percent(sum(map(abs, reserved)) / len(reserved)),
        "reserved_worst": _percent(max(reserved, key=abs), "+"),
    }  # fmt: skip
    return f"{text.format(**values)}\n"


def stand_in_edge(table: Path = STAND_IN_EDGE) -> str:
    """The results of benchmarks/card_edge.py: how recipes with each verdict ended."""
    with table.open(newline="", encoding="utf-8") as file:
        recipes = list(csv.DictReader(file))
    outcomes = ("finished", "out of memory")
    counts = collections.Counter((recipe["verdict"], recipe["outcome"]) for recipe in recipes)
    verdicts = [verdict for verdict in Verdict if any(verdict == recipe["verdict"] for recipe in recipes)]
    rows = [[verdict, *(counts[verdict, outcome] for outcome in outcomes)] for verdict in verdicts]
    return markdown(("verdict", *(f">{outcome}" for outcome in outcomes)), rows)


def stand_in_end(table: Path = STAND_IN_END) -> str:
    """The results of benchmarks/card_end.py: how runs ended within budgets at the forecast's ends, and on smaller GPUs."""
    with table.open(newline="", encoding="utf-8") as file:
        cases = list(csv.DictReader(file))
    formats = list(dict.fromkeys(case["base_format"] for case in cases))
    groups: dict[str, dict[str, list[dict[str, str]]]] = {}
    for case in cases:
        groups.setdefault(_END_OFFSET.sub("", case["case"]), {}).setdefault(case["base_format"], []).append(case)
    rows = [[name, *(_ended(chosen.get(base_format, [])) for base_format in formats)] for name, chosen in groups.items()]
    return markdown(("memory", *formats), rows)


def _ended(cases: list[dict[str, str]]) -> str:
    """How often runs ended how, and what retries changed; a dash for cases that were not run."""
    if not cases:
        return "-"
    if not any(case["changes"] for case in cases):
        counts = collections.Counter(case["outcome"] for case in cases)
        return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    (case,) = cases
    retries = json.loads(case["changes"])
    settings = {name: value for changes in retries for name, value in changes.items()}
    return f"{case['outcome']}: " + (", ".join(f"`{name}={value}`" for name, value in settings.items()) or "no retry")


def stand_in_kernels(table: Path = STAND_IN_KERNELS) -> str:
    """The results of benchmarks/card_kernels.py: what a micro-batch asks of the GPU."""
    columns = ("technique", "base", ">kernels of a layer", ">kernels of a micro-batch, 4 layers", ">synchronisations")
    numbers = ("layer_kernels", "kernels", "synchronisations")
    with table.open(newline="", encoding="utf-8") as file:
        rows = [
            [row["technique"], row["base_format"], *(f"{float(row[name]):,.5g}" for name in numbers)]
            for row in csv.DictReader(file)
        ]
    return markdown(columns, rows)


def card_peers(table: Path = CARD_PEERS) -> str:
    """The results of benchmarks/card_peers.py: memory of a step by tool, and the longest rows that end."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row["allocated_bytes"] and row["tokens"]]
    longest = [row for row in rows if row["longest_tokens"] or (row["failed"] and not row["tokens"])]
    columns = ("tool", "setting", "GPU", ">rows x tokens", ">allocated, GiB", ">reserved, GiB", ">pinned host, GiB")
    memory = markdown(columns, [[*_peer_of(row), f"{row['micro_batch']} x {row['tokens']}", *_sizes_of(row)] for row in steps])
    columns = ("tool", "setting", "GPU", ">longest row, tokens", ">allocated, GiB", ">reserved, GiB", ">pinned host, GiB")
    lengths = markdown(columns, [[*_peer_of(row), _longest_of(row), *_sizes_of(row)] for row in longest])
    return f"{memory}\n{lengths}"


def _peer_of(row: dict[str, str]) -> list[str]:
    return [f"{row['peer']} {row['version']}", row["setting"], f"{row['gpu']}, {float(row['total_gib']):.1f} GiB"]


def _longest_of(row: dict[str, str]) -> str:
    return f"{int(row['longest_tokens']):,}" if row["longest_tokens"] else f"1,024: {row['failed']}"


def _sizes_of(row: dict[str, str]) -> list[str]:
    names = ("allocated_bytes", "reserved_bytes", "host_bytes")
    return [f"{int(row[name]) / GIB:.2f}" if row[name] else "not measured" for name in names]
