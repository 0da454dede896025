"""Writes the generated blocks of the documentation: settings, exit codes, events, plans, what fits, forecast errors.

    python docs/generate.py                 # make every block and write the pages; minutes
    python docs/generate.py settings cards  # only these blocks
    python docs/generate.py --check         # write nothing; exit 1 and name the blocks that are not up to date
    python docs/generate.py --check --quick # only the blocks that need no forecast: seconds, not minutes

A block is the text between `<!-- made by docs/generate.py: NAME -->` and `<!-- end -->`. Needs no GPU and no network.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import enum
import functools
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune.recipe.reference import Setting

ROOT = Path(__file__).resolve().parents[1]
BENCHMARK, MEASURED = ROOT / "benchmarks" / "forecast_accuracy.py", ROOT / "benchmarks" / "reference" / "measured_memory.csv"
#: Columns of the terminal that the plans are printed for.
WIDTH = 118
GIB = 2**30
_BLOCK = re.compile(r"<!-- made by docs/generate\.py: ([\w-]+) -->\n(.*?)<!-- end -->", re.S)

#: Rows of the table of needs: names in the model catalogue, smallest first.
MODELS = (
    "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "meta-llama/Llama-3.2-3B-Instruct", "Qwen/Qwen3-4B",
    "mistralai/Mistral-7B-Instruct-v0.3", "Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.3-70B-Instruct",
)  # fmt: skip
LENGTHS = (1024, 2048, 4096, 8192)
#: One card for each size of memory.
CARDS = ("rtx-4060", "rtx-3060", "rtx-4060-ti-16gb", "rtx-4090", "rtx-5090", "rtx-a6000", "a100-80gb")
#: The settings that take the least device memory; the table of needs is planned with these.
FRUGAL = {
    "load_in_4bit": True, "activation_checkpointing": "offload", "optim": "adamw_8bit", "per_device_train_batch_size": 1,
    "packing": False, "lora_r": 16,
}  # fmt: skip


# -- pages and blocks


def pages() -> list[Path]:
    """Every page of the documentation."""
    return [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(text: str) -> dict[str, str]:
    """Name -> content of each block on a page."""
    return dict(_BLOCK.findall(text))


def block(page: str, name: str) -> str:
    """The present content of a block on a page. Raises KeyError when there is none."""
    return blocks_of((ROOT / page).read_text(encoding="utf-8"))[name]


def replaced(text: str, made: dict[str, str]) -> str:
    """A page's text with the blocks in `made` replaced."""

    def one(match: re.Match[str]) -> str:
        name, old = match[1], match[2]
        return f"<!-- made by docs/generate.py: {name} -->\n{made.get(name, old)}<!-- end -->"

    return _BLOCK.sub(one, text)


def markdown(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table. A column whose name begins with `>` is right-aligned."""
    columns = list(columns)
    lines = [[column.removeprefix(">") for column in columns], ["--:" if column[:1] == ">" else "---" for column in columns]]
    lines += [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cells(table: str) -> list[list[str]]:
    """The rows of a table made by `markdown`, without the header."""
    return [re.split(r"(?<!\\) \| ", line[2:-2]) for line in table.splitlines()[2:]]


# -- the recipe


def settings() -> str:
    """Every setting of the schema, by group."""
    from finetune.recipe.reference import settings_reference
    from finetune.recipe.schema import GROUPS

    rows = settings_reference()
    shown = ""
    for title in GROUPS:
        table = [(f"`{row.name}`", row.type, _default(row.default), _described(row)) for row in rows if row.group == title]
        shown += f"\n### {title}\n\n{markdown(('setting', 'value', 'default', 'what it is'), table)}"
    return f"{shown}\n"


def _default(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else "empty" if value in ([], {}, "") else str(value)


def _described(row: Setting) -> str:
    also = f" Also: {', '.join(f'`{alias}`' for alias in row.aliases)}." if row.aliases else ""
    return row.description + also


def other_tools() -> str:
    """What becomes of the keys of each tool whose configurations are read."""
    from finetune.recipe.foreign import TOOLS, Ignore, Keep, Refuse

    shown = ""
    for tool in TOOLS:
        kept = [f"`{key}` -> `{rule.ours}`" for key, rule in tool.keys.items() if isinstance(rule, Keep)]
        together = [f"`{key}`" for key, rule in tool.keys.items() if not isinstance(rule, (Keep, Ignore, Refuse))]
        without = sum(isinstance(rule, Ignore) for rule in tool.keys.values())
        refused = [f"`{key}`" for key, rule in tool.keys.items() if isinstance(rule, Refuse)]
        assumed = [f"`{name}` {_default(value)}" for name, value in tool.defaults.items()]
        rows = [
            ("carried over", ", ".join(kept)), ("read together", ", ".join(together)), ("without effect", f"{without} keys"),
            ("refused where set", ", ".join(refused)), ("its defaults", ", ".join(assumed)),
        ]  # fmt: skip
        shown += f"\n### {tool.name}\n\n{markdown(('', 'keys'), rows)}"
    return f"{shown}\n"


def exits() -> str:
    """The exit codes, from the error classes that define them."""
    from finetune import errors

    meanings: dict[int, str] = {}
    for kind in vars(errors).values():
        if isinstance(kind, type) and "exit_code" in vars(kind) and kind is not errors.FinetuneError:
            meanings[kind.exit_code] = f"{meanings.get(kind.exit_code, '')} {(kind.__doc__ or '').strip()}".strip()
    rows = [(0, "Done, or the plan fits."), (1, "An internal error, or a process that was killed."), *sorted(meanings.items())]
    return markdown((">exit code", "meaning"), [*rows, ("130, 143", "Stopped by Ctrl-C or a stop signal, with a checkpoint.")])


# -- events


def events() -> str:
    """The fields of every kind of event, from its type."""
    from finetune.events import KINDS, Memory

    shown = ""
    for name, kind in KINDS.items():
        more = " The memory fields follow." if issubclass(kind, Memory) else ""
        table = markdown(("field", "value", "what it is"), _fields(kind))
        shown += f"\n### `{name}`\n\n{' '.join((kind.__doc__ or '').split())}{more}\n\n{table}"
    memory = markdown(("field", "value", "what it is"), _fields(Memory))
    return f"{shown}\n### Memory fields\n\n{' '.join((Memory.__doc__ or '').split())}\n\n{memory}\n"


def _fields(kind: type) -> list[tuple[str, str, str]]:
    """Name, type with unit, and meaning of each field that the type adds itself."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return [
        (f"`{name}`", _value(name, typing.get_type_hints(kind)[name]), hints[name].__metadata__[-1])
        for name in kind.__annotations__
        if typing.get_origin(hints[name]) is typing.Annotated
    ]


def _value(name: str, hint: object) -> str:
    words = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}
    units = {"_bytes": "bytes", "_s": "seconds", "_c": "°C", "_w": "watts"}
    unit = next((unit for ending, unit in units.items() if name.endswith(ending) and not name.endswith("_per_s")), None)
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    shown = [unit if unit and kind in (int, float) else words.get(kind, "") for kind in kinds]
    return " or ".join(part or ("list of text" if "tuple" in str(hint) else "object") for part in shown)


# -- plan.json


def plan_json() -> str:
    """The types that plan.json is made of."""
    from finetune.card.card import Card
    from finetune.forecast.forecast import AtLimit, Forecast
    from finetune.plan import plan

    parts = (
        plan.Plan, Forecast, AtLimit, Card, plan.DataStatistics, plan.DataProblem, plan.Alternative, plan.Suggestion,
        plan.Shortfall, plan.LengthCost, plan.ResourceCheck, plan.ManyCards, plan.CardNeeds,
    )  # fmt: skip
    shown = ""
    for part in parts:
        hints = typing.get_type_hints(part)
        names = {name: "plan" if name == "settings" else name for name in part.__annotations__ if name != "lengths"}
        rows = [(f"`{shown_name}`", _type(name, hints[name])) for name, shown_name in names.items()]
        doc = (part.__doc__ or "").replace("`settings`", "`plan`")
        shown += f"\n### {part.__name__}\n\n{' '.join(doc.split())}\n\n{markdown(('field', 'value'), rows)}"
    return f"{shown}\n"


def _type(name: str, hint: typing.Any) -> str:
    """A type as a reader of JSON sees it."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_type(name, part) for part in inner)
    if typing.get_origin(hint) is tuple:
        return f"list of {_type(name, inner[0])}"
    if inner:
        return f"object: {_type(name, inner[0])} to {_type(name, inner[1])}"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " or ".join(f"`{value.value}`" for value in hint)
    if hint.__name__ == "Settings":
        return "object: [every setting](recipe.md)"
    if dataclasses.is_dataclass(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return _value(name, hint)


# -- plans


def plan_of(recipe: str) -> str:
    """The output of `finetune plan RECIPE`; overrides may follow the name."""
    from finetune.cli.plan import show_plan

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        name, *overrides = recipe.split()
        show_plan(name, overrides, model=None, data=None, gpu=None, free=None, as_json=False)
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    return "```console\n$ finetune plan {}\n{}\n```\n".format(recipe, "\n".join(lines).rstrip())


def many_cards() -> str:
    """The end of `finetune plan`'s output for a recipe that does not fit: what each of two cards would need."""
    lines = plan_of("7b-4090 gpu=rtx-4060 max_length=8192").splitlines(keepends=True)
    begin = next(number for number, line in enumerate(lines) if line.startswith("2 cards with"))
    return "".join([*lines[:2], "...\n", *lines[begin:]])


def recipe_row(name: str) -> list[str]:
    """A shipped recipe's row of the table: its plan, peak, verdict and speed."""
    from finetune.card import find_card
    from finetune.plan.planning import plan_recipe, without_rows
    from finetune.recipe import load_recipe

    recipe = load_recipe(name)
    plan = plan_recipe(recipe, find_card(recipe.gpu), without_rows)
    forecast, max_length = plan.forecast, plan.settings.max_length
    assert forecast is not None  # only a CPU plan has none
    chosen = next(row.plan for row in plan.alternatives if row.chosen)
    peak = f"{_gib(forecast.peak_bytes)} (at most {_gib(forecast.peak_high_bytes)}) of {_gib(plan.card.free_bytes)}"
    speed = f"{forecast.tokens_per_s:,.0f}" if forecast.tokens_per_s else "unknown"
    model = plan.settings.model_name_or_path.rpartition("/")[2]
    return [f"`{name}`", model, plan.card.name, f"{max_length:,}", chosen, peak, plan.verdict, speed]


def recipes() -> str:
    """The table of the shipped recipes for cards, with their plans."""
    from finetune.recipe import load_recipe, shipped_recipes

    names = [name for name in shipped_recipes() if load_recipe(name).gpu != "cpu"]
    columns = ("recipe", "model", "card", ">row", "plan", ">peak, GiB", "verdict", ">tokens/s, modelled")
    return markdown(columns, [recipe_row(name) for name in names])


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


# -- what fits


def need_row(model: str) -> list[str]:
    """Upper end of the forecast in GiB with the FRUGAL settings, for each length; rounded up."""
    from finetune.card.find import find_card
    from finetune.plan.make import make_plan
    from finetune.recipe import recipe_from

    card = dataclasses.replace(find_card(REFERENCE_CARD), total_bytes=512 * GIB, free_bytes=512 * GIB)
    row = []
    for length in LENGTHS:
        recipe = recipe_from({"model_name_or_path": model, "dataset": "rows.jsonl", "max_length": length, **FRUGAL})
        forecast = make_plan(recipe, card, None).forecast
        assert forecast is not None  # only a CPU plan has none
        row.append(f"{math.ceil(100 * forecast.peak_high_bytes / GIB) / 100:.2f}")
    return [model, *row]


REFERENCE_CARD = "rtx-4090"


def needs() -> str:
    """The table of needs."""
    return markdown(("model", *(f">{length:,}" for length in LENGTHS)), [need_row(model) for model in MODELS])


def fits() -> str:
    """The longest rows that fit for each model and card, from the table of needs on the page."""
    table = cells(block("docs/fits.md", "needs"))
    columns = [f">{card} ({_gib(_room(card))})" for card in CARDS]
    return markdown(("model", *columns), [[name, *(_longest(row, card) for card in CARDS)] for name, *row in table])


def _longest(row: list[str], card: str) -> str:
    fitting = [length for length, gib in zip(LENGTHS, row, strict=True) if float(gib) * GIB <= _room(card)]
    return f"{max(fitting):,}" if fitting else "-"


@functools.cache
def _room(card: str) -> int:
    """Bytes that a forecast for REFERENCE_CARD may take on this card: free, less what its context and cuBLAS take more."""
    from finetune.card.find import find_card
    from finetune.forecast.rules import cublas_workspace_bytes

    this, reference = find_card(card), find_card(REFERENCE_CARD)
    context = [(each.context_bytes or 0) + each.context_uncertainty_bytes for each in (this, reference)]
    cublas = [2 * cublas_workspace_bytes(each.capability or (8, 0)) for each in (this, reference)]
    return this.free_bytes - (context[0] - context[1]) - (cublas[0] - cublas[1])


def fits_short(columns: tuple[str, ...] = ("card", ">free", "rows of 1,024 tokens", "2,048", "4,096"), none: str = "-") -> str:
    """The largest model that fits each card, from the table of needs on the page."""
    from finetune.card.find import find_card

    table = cells(block("docs/fits.md", "needs"))
    rows = []
    for card in CARDS:
        fitting = [[row[0] for row in table if float(row[1 + n]) * GIB <= _room(card)] for n in range(3)]
        largest = [names[-1].rpartition("/")[2] if names else none for names in fitting]
        rows.append([card, f"{_gib(find_card(card).free_bytes)} GiB", *largest])
    return markdown(columns, rows)


def cards() -> str:
    """The catalogue of cards."""
    from finetune.card.find import catalogue

    rows = []
    for name, card in catalogue().items():
        capability = ".".join(map(str, card.capability)) if card.capability else "unknown"
        rows.append([f"`{name}`", f"{card.total_bytes / GIB:.2f}", f"{card.free_bytes / GIB:.2f}", capability])
    return markdown(("card", ">memory, GiB", ">taken as free, GiB", ">compute capability"), rows)


# -- which models


def model_types() -> str:
    """The committed table of benchmarks/model_types.py: how many types are forecast, and the reasons for the rest."""
    with (ROOT / "benchmarks" / "reference" / "model_types.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    good = [row["model_type"] for row in rows if row["result"] == "forecast"]
    rest = [(f"`{row['model_type']}`", row["detail"]) for row in rows if row["result"] != "forecast"]
    listed = textwrap.fill(", ".join(f"`{name}`" for name in good) + ".", 140, break_long_words=False, break_on_hyphens=False)
    refused = markdown(("model type", "why it is refused"), rest)
    return f"{len(rows)} model types: {len(good)} forecast, {len(rest)} refused.\n\n{listed}\n\n{refused}"


# -- how far to trust it


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


#: Blocks that take no forecast, blocks that take forecasts, and blocks made from other blocks on the pages.
QUICK: dict[str, Callable[[], str]] = {
    "settings": settings,
    "other-tools": other_tools,
    "exit-codes": exits,
    "cards": cards,
    "events": events,
    "plan-json": plan_json,
    "model-types": model_types,
    "gpu": gpu,
    "gpu-short": gpu_short,
    "gpu-short-zh": functools.partial(
        gpu_short,
        "在 {cards} 上运行 {runs} 次：已分配显存的预测平均误差 {mean}，最差 {worst}。",
        "编写时没有可用的 NVIDIA 显卡：显卡上的任何数字都未测量。",
    ),
}
SLOW: dict[str, Callable[[], str]] = {
    "plan-7b-4090": functools.partial(plan_of, "7b-4090"), "plan-7b-4060": functools.partial(plan_of, "7b-4060"),
    "many-cards": many_cards, "recipes": recipes, "needs": needs, "accuracy": accuracy,
    "reserved": reserved,
}  # fmt: skip
DERIVED: dict[str, Callable[[], str]] = {
    "fits": fits,
    "fits-short": fits_short,
    "fits-short-zh": functools.partial(fits_short, ("显卡", ">可用显存", "每行 1,024 个 token", "2,048", "4,096")),
    "accuracy-short": accuracy_short,
    "accuracy-short-zh": functools.partial(
        accuracy_short, "他人在 Tesla T4 上的 {rows} 次实测：平均误差 {mean}，最差 {worst}。"
    ),
}


@contextlib.contextmanager
def clean_state() -> Iterator[None]:
    """Empty caches, so that no forecast, measurement or hub file of this machine changes a page."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(FINETUNE_CACHE=f"{folder}/cache", HF_HOME=f"{folder}/hub", HF_HUB_OFFLINE="1", COLUMNS=str(WIDTH))
        with contextlib.chdir(folder):
            yield


def update(names: list[str], write: bool) -> list[str]:
    """Make the blocks, derived ones last; returns those that differ from the pages."""
    every = {**QUICK, **SLOW, **DERIVED}
    changed = []
    for name in [name for name in every if not names or name in names]:
        made = every[name]()
        for page in pages():
            text = page.read_text(encoding="utf-8")
            if blocks_of(text).get(name, made) == made:
                continue
            changed.append(f"{name} in {page.relative_to(ROOT)}")
            if write:
                page.write_text(replaced(text, {name: made}), encoding="utf-8")
        print(f"{name}: {'changed' if changed and changed[-1].startswith(f'{name} in') else 'as it was'}", flush=True)  # noqa: T201
    return changed


def main() -> int:
    """Returns 1 when --check found a block that is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *QUICK, *SLOW, *DERIVED], metavar="BLOCK")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--quick", action="store_true", help="skip the blocks that take forecasts")
    chosen = parser.parse_args()
    with clean_state():
        changed = update([*QUICK, *DERIVED] if chosen.quick else chosen.names, not chosen.check)
    return 1 if chosen.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
