"""An evaluation's scores, differences and rows, as HTML."""

from __future__ import annotations

from typing import Any

from app.views.markup import note, table
from finetune.evaluate.paired import Difference, in_words, ordered
from finetune.units import format_seconds

_ROWS_SHOWN = 12


def scores(result: dict[str, Any], order: str, rows_shown: int = _ROWS_SHOWN) -> str:
    """What `finetune eval --json` printed: a table of scores, the differences in words, and rows in the chosen order."""
    base, tuned = result["base"], result["tuned"]
    lines = [("exact match", "exact_match", _percent), (result["score"], "score", _number), ("valid JSON", "valid", _percent)]
    if result["score"] == "exact":
        del lines[1]
    lines += [("loss per trained token", "loss", _number), ("perplexity", "perplexity", _number)]
    lines += [("token accuracy", "token_accuracy", _percent)]
    rows = [[name, write(base[key]), write(tuned[key])] for name, key, write in lines if tuned[key] is not None]
    rows += [[f"field {name}", _percent(base["fields"][name]), _percent(tuned["fields"][name])] for name in tuned["fields"]]
    source = f"rows of {result['data']}" if result["data"] else "held-out rows"
    summary = table([f"{result['rows']:,} {source}", ">base", ">tuned"], rows, "Base against tuned", hidden_caption=True)
    told = "".join(
        note(f"{name}: {in_words(Difference(**gap), scale, unit)}") for name, gap, scale, unit in _gaps(result) if gap
    )
    known = f" {result['reused']:,} results are from an earlier evaluation." if result["reused"] else ""
    first = ordered(base["scores"], tuned["scores"], order)[:rows_shown]
    answers = [
        [result["prompts"][row].strip(), result["references"][row], base["answers"][row], tuned["answers"][row],
         f"{base['scores'][row]:.3g}", f"{tuned['scores'][row]:.3g}"]
        for row in first
    ]  # fmt: skip
    columns = ["prompt", "expected", "base", "tuned", ">score of base", ">of tuned"]
    took = note(f"Evaluated in {format_seconds(result['seconds'])}.{known}")
    return summary + told + took + (table(columns, answers, "Answers") if answers else "")


def _gaps(result: dict[str, Any]) -> list[tuple[str, Any, float, str]]:
    """Each difference with its name, scale and unit."""
    own = [] if result["score"] == "exact" else [(result["score"], result["score_difference"], 1.0, "")]
    exact = ("exact match", result["exact_match_difference"], 100.0, " points")
    return [*own, exact, ("loss", result["loss_difference"], 1.0, "")]


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"
