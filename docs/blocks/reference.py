"""Blocks made from the code's own tables and types: settings, exit codes, events, plan.json, cards, model types."""

from __future__ import annotations

import csv
import dataclasses
import enum
import re
import textwrap
import types
import typing
from pathlib import Path

from blocks.page import GIB, ROOT, markdown

from finetune.settings.reference import Setting


def settings() -> str:
    """Every setting of the schema, by group."""
    from finetune.settings.reference import settings_reference
    from finetune.settings.schema import GROUPS

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


def preferences() -> str:
    """How much faster a less simple setting must be before the planner chooses it."""
    from finetune.planner import strategy
    from finetune.settings.base_formats import BITS_16, QUANTISED
    from finetune.settings.optimizers import FUSED, OPTIMIZERS

    prices = {f"{base.label} weights instead of {BITS_16.label}": base.price for base in QUANTISED}
    prices |= {f"`optim: {name}` instead of {FUSED}": row.price for name, row in OPTIMIZERS.items() if row.planned}
    prices |= {
        f"`activation_checkpointing: {str(kind).lower()}`": price for kind, price in strategy.CHECKPOINTING_PRICE.items()
    }
    prices |= {"a doubled micro-batch": strategy.DOUBLING_PRICE, "`offload_embeddings: true`": strategy.HOST_TABLE_PRICE}
    rows = [(name, f"{1 - 1 / price:.1%}") for name, price in prices.items() if price > 1]
    rows.append(("weights of layers in host memory", "not where all fit on the GPU"))
    return markdown(("setting", ">saves at least"), rows)


def other_tools() -> str:
    """The keys of each tool that become settings, and its defaults."""
    from finetune.recipe.foreign import tools

    shown = ""
    for tool in tools():
        carried, by_value = [], []
        for key, row in tool.keys.items():
            if setting := row.get("else") if isinstance(row, dict) else row:
                carried.append(f"`{key}` -> `{setting}`")
            else:
                by_value.append(f"`{key}`")
        counts = {
            outcome: sum(actual == outcome for actual, _ in tool.reasons.values())
            for outcome in ("not carried over", "no effect")
        }
        rows = [
            ("carried over", ", ".join(carried)), ("by their values", ", ".join(by_value)),
            ("the effective batch", " x ".join(f"`{key}`" for key in tool.table["batch"])),
            ("not carried over", f"{counts['not carried over']} keys"), ("without effect", f"{counts['no effect']} keys"),
            ("its defaults", ", ".join(f"`{key}` {_of_tool(value)}" for key, value in tool.defaults.items())),
        ]  # fmt: skip
        shown += f"\n### {tool.name}\n\nVersion {tool.table['version']}.\n\n{markdown(('', 'keys'), rows)}"
    return f"{shown}\n"


def _of_tool(value: object) -> str:
    return f"{value['times']} x {value['of']}" if isinstance(value, dict) else _default(value)


def exits() -> str:
    """The exit codes, from the error classes that define them."""
    from finetune import errors

    meanings: dict[int, str] = {}
    for kind in vars(errors).values():
        if isinstance(kind, type) and "exit_code" in vars(kind) and kind is not errors.FinetuneError:
            meanings[kind.exit_code] = f"{meanings.get(kind.exit_code, '')} {(kind.__doc__ or '').strip()}".strip()
    rows = [(0, "Done, or the plan fits."), (1, "An internal error, or a process that was killed."), *sorted(meanings.items())]
    return markdown((">exit code", "meaning"), [*rows, ("130, 143", "Paused by Ctrl-C or a stop signal, with a checkpoint.")])


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
    type_names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}
    units = {"_bytes": "bytes", "_s": "seconds", "_c": "°C", "_w": "watts"}
    unit = next((unit for ending, unit in units.items() if name.endswith(ending) and not name.endswith("_per_s")), None)
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    shown = [unit if unit and kind in (int, float) else type_names.get(kind, "") for kind in kinds]
    return " or ".join(part or ("list of text" if "tuple" in str(hint) else "object") for part in shown)


def plan_json() -> str:
    """The types that plan.json is made of."""
    from finetune.card.card import Card
    from finetune.memory.forecast import Forecast
    from finetune.planner import plan

    parts = (
        plan.Plan, Forecast, Card, plan.DataStatistics, plan.DataProblem, plan.Alternative, plan.Suggestion,
        plan.ResourceCheck, plan.LayerCopies,
    )  # fmt: skip
    shown = ""
    for part in parts:
        hints = typing.get_type_hints(part)
        names = {
            name: "plan" if name == "settings" else name
            for name in part.__annotations__
            if name not in ("lengths", "most_trained", "eval_most_trained")
        }
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


def cards() -> str:
    """The catalogue of cards."""
    from finetune.card.find import catalogue

    rows = []
    for name, card in catalogue().items():
        capability = ".".join(map(str, card.capability)) if card.capability else "unknown"
        rows.append([f"`{name}`", f"{card.total_bytes / GIB:.2f}", f"{card.free_bytes / GIB:.2f}", capability])
    return markdown(("card", ">memory, GiB", ">taken as free, GiB", ">compute capability"), rows)


#: Special tokens in the text of a chat template.
_MARK = re.compile(
    r"<[|｜][^<>|｜\s]{2,40}[|｜]>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|<channel\|>|<\|channel>|<\|tool_response>"
)


def chat_formats() -> str:
    """What each chat template that TRL ships writes around an answer and a thought, as it is learned from the template."""
    import trl
    from transformers import AutoTokenizer

    from finetune.bundled import model_path
    from finetune.data.checks import BadRow
    from finetune.data.template import Template

    files = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    texts = {file.stem: file.read_text(encoding="utf-8") for file in files if not file.stem.endswith("_training")}
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny"))
    marks = sorted({mark for text in texts.values() for mark in _MARK.findall(text)})
    tokenizer.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": marks})
    families: dict[tuple[str, ...], list[str]] = {}
    for name, text in texts.items():
        tokenizer.chat_template = text
        template = Template(tokenizer)
        form = template.format
        try:
            template.render([{"role": "user", "content": "a question"}])
        except BadRow:
            continue  # it takes lists of parts, such as pictures
        thought = _code(f"{form.marks[0].opening}...{form.marks[0].closing}")
        written = form.writes_thought
        thoughts = thought if written[False] else f"before calls: {thought}" if written[True] else "not written"
        calls = ", ".join(map(_code, form.call_openings)) or "not written"
        families.setdefault((_code(form.before_answer), thoughts, calls), []).append(f"`{name}`")
    rows = [(", ".join(names), *row) for row, names in families.items()]
    return markdown(("template", "before an answer without a thought", "a thought", "a call begins with"), rows)


def _code(text: str) -> str:
    return f"`{text.strip()}`".replace("\n", "⏎") if text.strip() else "nothing"


def model_types() -> str:
    """The committed table of benchmarks/model_types.py: the types that train, are only planned, or are refused, and why."""
    with (ROOT / "benchmarks" / "reference" / "model_types.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    trains = {row["model_type"]: row["trains"] == "yes" for row in rows}
    good = [row["model_type"] for row in rows if row["result"] == "forecast" and trains[row["model_type"]]]
    planned = [(f"`{row['model_type']}`", "planned", row["trains"]) for row in rows if row["trains"] not in ("", "yes")]
    refused = [
        (f"`{row['model_type']}`", f"refused{', though a small model trains' * trains[row['model_type']]}", row["detail"])
        for row in rows
        if row["result"] != "forecast"
    ]
    listed = textwrap.fill(", ".join(f"`{name}`" for name in good) + ".", 140, break_long_words=False, break_on_hyphens=False)
    counts = f"{len(rows)} model types: {len(good)} planned and trained, {len(planned)} only planned, {len(refused)} refused."
    return f"{counts}\n\n{listed}\n\n{markdown(('model type', 'it is', 'why'), sorted(planned + refused))}"


def picture_types() -> str:
    """The committed table of benchmarks/picture_types.py: which types read pictures, and the reasons for the rest."""
    with (ROOT / "benchmarks" / "reference" / "picture_types.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row["result"], []).append(f"`{row['model_type']}`")
    listed = [
        f"{result.capitalize()} ({len(names.get(result, ()))}): {', '.join(names.get(result, ()))}."
        for result in ("compared", "not compared")
    ]
    reasons = [(f"`{row['model_type']}`", row["result"], row["reason"]) for row in rows if row["reason"]]
    paragraphs = "\n\n".join(textwrap.fill(text, 140, break_long_words=False, break_on_hyphens=False) for text in listed)
    return f"{paragraphs}\n\n{markdown(('model type', 'with pictures', 'why'), reasons)}"


def families() -> str:
    """The committed table of benchmarks/families.py: the phase of each family that is furthest from its forecast."""
    from finetune.planner.defaults import SEPARATES_PACKED_ROWS

    with (ROOT / "benchmarks" / "reference" / "families.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    worst: dict[str, dict[str, str]] = {}
    for row in rows:
        error = f"{float(row['worst_error']):+.2%} ({row['worst_phase']})"
        worst.setdefault(row["family"], {})[row["bits"]] = error
    table = [
        (f"`{name}`", errors["16"], errors["4"], "yes" if name in SEPARATES_PACKED_ROWS else "no")
        for name, errors in worst.items()
    ]
    most = max(abs(float(row["worst_error"])) for row in rows)
    shown = markdown(("family", ">16 bit, worst phase", ">4 bit, worst phase", "packed by the planner"), table)
    return f"{len(worst)} families, at most {most:.2%} off in any phase.\n\n{shown}"
