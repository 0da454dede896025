"""Results of evaluations: their files in a run, and paired differences with intervals."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from finetune.files import parse_checked, read_json_as, read_object, remove_left_over, with_checksum, write_json
from finetune.run.directory import RunDirectory
from finetune.units import format_measured


@dataclass(frozen=True)
class Score:
    """One model's means over rows, and the values of each row."""

    exact_match: float | None  # share of rows answered exactly
    loss: float | None  # of a trained token, in nats
    answers: list[str] = field(default_factory=list)  # of rows with a prompt, as are `exact` and `scores`
    perplexity: float | None = None  # the loss's exponential
    exact: list[bool] = field(default_factory=list)
    row_losses: list[float] = field(default_factory=list)  # of each sequence: mean over its trained tokens
    row_tokens: list[int] = field(default_factory=list)  # of each sequence: number of trained tokens
    token_accuracy: float | None = None  # share of trained tokens that are the likeliest
    score: float | None = None  # of the chosen kind
    scores: list[float] = field(default_factory=list)
    valid: float | None = None  # share of answers that are JSON, or whose calls can be read
    fields: dict[str, float] = field(default_factory=dict)  # share of rows with each field right
    #: How much likelier the chosen answer of a pair is than the rejected answer, in nats.
    margins: list[float] = field(default_factory=list)
    pair_margin: float | None = None  # mean of `margins`
    pairs_in_order: float | None = None  # share of pairs whose chosen answer is likelier
    thoughts: list[str] = field(default_factory=list)  # before the answers; not scored
    cut: int = 0  # answers that were stopped at the limit of tokens

    @property
    def in_order(self) -> list[bool]:
        return [margin > 0 for margin in self.margins]


@dataclass(frozen=True)
class Comparison:
    """Scores of base and tuned model on the same rows."""

    rows: int
    base: Score
    tuned: Score
    prompts: list[str]
    references: list[str]
    seconds: float
    #: A difference is tuned minus base; None for fewer than two rows.
    exact_match_difference: Difference | None = None
    loss_difference: Difference | None = None
    score: str = "exact"  # name of the chosen score
    score_difference: Difference | None = None
    data: str | None = None  # file of the rows; None for held-out rows
    reused: int = 0  # answers and losses of both models from an earlier evaluation
    notes: list[str] = field(default_factory=list)
    trained_rows: int = 0  # sequences of `data` that the run was trained on
    pairs_in_order_difference: Difference | None = None
    pair_margin_difference: Difference | None = None
    #: Share of all pairs of a good and a bad labelled answer in which training made the good answer likelier by more than the
    #: bad one; about one half if nothing was learned.
    labels_in_order: float | None = None
    against_adapter: bool = False  # `base` is the adapter that this run continued, its method's reference
    #: Of the parts of a score of calls, over the rows that have the part.
    field_differences: dict[str, Difference] = field(default_factory=dict)
    max_new_tokens: int | None = None  # limit of thought and answer together
    base_prompt_end: str = ""  # ends the base model's prompts, so that it answers without a thought
    score_because: str = ""  # why the score was chosen; empty if the user chose it

    @property
    def models(self) -> dict[str, Score]:
        return {"before": self.base, "now": self.tuned} if self.against_adapter else {"base": self.base, "tuned": self.tuned}


class Measure(NamedTuple):
    """A figure of both models."""

    title: str
    is_share: bool
    base: float | None
    tuned: float | None
    difference: Difference | None

    @property
    def values(self) -> list[str]:
        return [format_measured(value, ".1%" if self.is_share else ".4f") for value in (self.base, self.tuned)]

    @property
    def gap(self) -> str:
        scale, unit = (100.0, " points") if self.is_share else (1.0, "")
        return format_difference(self.difference, scale, unit)


#: Title of a figure, its field of `Score`, and whether it is a share.
_MEASURES = (
    ("exact match", "exact_match", True), ("", "score", False), ("valid JSON", "valid", True),
    ("pairs in order", "pairs_in_order", True), ("margin of a pair, nats", "pair_margin", False),
    ("token accuracy", "token_accuracy", True), ("loss per trained token", "loss", False), ("perplexity", "perplexity", False),
)  # fmt: skip


def measures(result: dict[str, Any]) -> list[Measure]:
    """Return the figures of a `Comparison`, given as a dictionary."""
    base, tuned, score = result["base"], result["tuned"], result["score"]
    gaps = {name: result.get(f"{name}_difference") for _, name, _ in _MEASURES}
    if score == "token accuracy":
        gaps["token_accuracy"] = result["score_difference"]
    # these repeat another figure, or say nothing about free text
    left_out = {"exact": ["score"], "token accuracy": ["score", "exact_match"]}.get(score, [])
    rows: list[tuple[str, bool, Any, Any, Any]] = [
        (title or score, is_share, base.get(name), tuned.get(name), gaps[name])
        for title, name, is_share in _MEASURES
        if name not in left_out and tuned.get(name) is not None
    ]
    field_gaps, fields = result.get("field_differences") or {}, tuned["fields"].items()
    # after exact match and score
    rows[2:2] = [(f"{score}: {name}", True, base["fields"][name], share, field_gaps.get(name)) for name, share in fields]
    return [Measure(*row[:4], Difference(**row[4]) if row[4] else None) for row in rows]


@dataclass(frozen=True)
class Forgetting:
    """Loss of a trained token of general questions, in nats, before and after training."""

    rows: int
    before: float | None  # of the base model
    now: float | None
    difference: Difference | None = None  # now minus before; None for fewer than two rows

    def summary(self) -> str:
        """Return one line that says whether the loss rose."""
        verdict = ""
        if self.difference is not None and self.difference.is_significant:
            verdict = "; lost in part" if self.difference.value > 0 else "; nothing lost"
        losses = f"loss {format_measured(self.before)} before, {format_measured(self.now)} now"
        return f"general questions ({self.rows:,}): {losses}{verdict}; {format_difference(self.difference)}"


def answers_without_thoughts(run: RunDirectory) -> bool:
    """Return whether the run's model can think, and all rows taught it not to."""
    report = read_object(run.data / "report.json") or {}
    findings = {finding["kind"]: finding["rows"] for finding in report.get("findings", ())}
    return 0 < report.get("rows_used", 0) <= findings.get("unthinking", 0)


def save_result(run: RunDirectory, name: str, values: dict[str, Any]) -> None:
    """Write a result for reports, or no result if the disk fails."""
    path = run.path / "evaluations" / name
    with contextlib.suppress(OSError):
        remove_left_over(path)
        write_json(path, values, checksum=True)


def read_evaluations(run: RunDirectory) -> dict[str, dict[str, Any]]:
    """Return a run's evaluations, by file name."""
    evaluations = {}
    for path in sorted((run.path / "evaluations").glob("scores-*.json")):
        comparison = read_json_as(path, Comparison)
        if comparison and _is_consistent(comparison):
            evaluations[path.stem.removeprefix("scores-")] = asdict(comparison)
    return evaluations


def unreadable_evaluations(run: RunDirectory) -> str:
    """Return a sentence that names unreadable or changed files of evaluations; empty without any."""
    readable = {f"scores-{name}" for name in read_evaluations(run)}
    files = sorted((run.path / "evaluations").glob("*.json"))
    names = [
        path.name for path in files
        if (path.stem not in readable if path.stem.startswith("scores-") else read_object(path) is None)
    ]  # fmt: skip
    return f"{', '.join(names)} can't be read; measure again: finetune eval {run.path.name}" if names else ""


def _is_consistent(comparison: Comparison) -> bool:
    base, tuned = comparison.base, comparison.tuned
    # pages show each score beside its prompt, expected answer and answers
    row_count = min(map(len, (comparison.prompts, comparison.references, base.answers, tuned.answers)))
    same_rows = len(base.scores) == len(tuned.scores) and set(base.fields) >= set(tuned.fields)
    return same_rows and len(tuned.scores) <= row_count and len(tuned.row_losses) == len(tuned.row_tokens)


def read_forgetting(run: RunDirectory) -> Forgetting | None:
    """Return the last measurement of forgetting."""
    return read_json_as(run.path / "evaluations" / "lost.json", Forgetting)


class Journal:
    """Computed answers and losses by a digest of the row, saved for later evaluations."""

    def __init__(self, folder: Path, model: str, inputs: Any) -> None:
        # `inputs` are all that decides an answer except the row
        self._path = folder / f"{model}-{digest(inputs)}.jsonl"
        self.entries: dict[str, dict[str, Any]] = {}
        self.problem = ""
        lines: list[bytes] = []
        with contextlib.suppress(OSError):
            lines = self._path.read_bytes().split(b"\n")
        for line in lines:
            # a killed process leaves an incomplete line
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                entry = parse_checked(line)
                self.entries[entry.pop("row")] = entry

    def add(self, entries: dict[str, dict[str, Any]]) -> None:
        """Add entries, also to the file; `problem` says why it can't be written."""
        self.entries.update(entries)
        lines = "".join(with_checksum(json.dumps({"row": row, **entry})) + "\n" for row, entry in entries.items())
        try:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                file.write(b"\n" + lines.encode())  # a new line first: the last one may be incomplete
        except OSError as error:
            self.problem = f"answers are not kept for a later evaluation: {error}"


def digest(values: Any) -> str:
    """Return a short hash of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:24]


_DRAWS = 2_000  # of the bootstrap
#: 95 % of a normal distribution are within this many standard deviations.
_NORMAL_QUANTILE = 1.96
#: Above this half width of the interval / difference, no number of rows is named: the number grows with its square.
_MAX_RELATIVE_WIDTH = 1000


@dataclass(frozen=True)
class Difference:
    """Tuned minus base, with a 95 % interval."""

    value: float
    low: float
    high: float
    #: About how many more rows would make it significant; None if it is, if the difference is 0, or for too many to say.
    more_rows: int | None

    @property
    def is_significant(self) -> bool:
        return not self.low <= 0 <= self.high


def difference(
    base: Sequence[float], tuned: Sequence[float], weights: Sequence[float] | None = None, *, span: float = 0.0
) -> Difference | None:
    """Return the weighted mean of tuned - base; None for fewer than two rows or zero weights.

    `span` is the largest possible difference of a row; unless 0, two rows of this difference widen the interval.
    """
    if len(base) < 2 or not (weights is None or any(weights)):
        return None
    differences = np.asarray(tuned, dtype=float) - np.asarray(base, dtype=float)
    row_weights = np.ones(len(differences)) if weights is None else np.asarray(weights, dtype=float)
    mean_difference, row_count = float(np.average(differences, weights=row_weights)), len(differences)
    # Two more rows, one better and one worse by `span` (Bonett and Price 2012): few rows that differ say little about how many
    # rows differ in general.
    if span:
        differences = np.append(differences, (span, -span))
        row_weights = np.append(row_weights, (np.mean(row_weights),) * 2)
    shrunk_mean = float(np.average(differences, weights=row_weights))
    # paired bootstrap: Efron 1979
    rng, means = np.random.default_rng(0), np.empty(_DRAWS)
    for draw in range(_DRAWS):
        drawn_rows = rng.integers(len(differences), size=len(differences))
        means[draw] = np.average(differences[drawn_rows], weights=row_weights[drawn_rows])
    degrees_of_freedom = len(differences) - 1
    # The percentile interval is too narrow for few rows: Hesterberg 2015 expands it.
    # Student's over the normal quantile (its first terms in 1/df), and n - 1 instead of n
    expansion = (1 + (_NORMAL_QUANTILE**2 + 1) / (4 * degrees_of_freedom)) * math.sqrt(len(differences) / degrees_of_freedom)
    lower, upper = (shrunk_mean + expansion * (float(quantile) - shrunk_mean) for quantile in np.percentile(means, (2.5, 97.5)))
    if span:
        lower, upper = max(-span, lower), min(span, upper)
    more_rows = None
    half_width = _NORMAL_QUANTILE * expansion * float(np.std(means))
    if lower <= 0 <= upper and half_width < _MAX_RELATIVE_WIDTH * abs(shrunk_mean):
        # the interval shrinks with the square root of the number of rows
        more_rows = max(1, math.ceil(row_count * (half_width / shrunk_mean) ** 2) - row_count)
    return Difference(mean_difference, lower, upper, more_rows)


def format_difference(difference: Difference | None, scale: float = 1.0, unit: str = "") -> str:
    """Format a difference with its interval, and how many more rows would be enough."""
    if difference is None:
        return "not measured"
    lower, value, upper = (f"{scale * number:+.3g}" for number in (difference.low, difference.value, difference.high))
    if difference.is_significant:
        return f"{value}{unit} (95 % interval {lower} to {upper})"
    more_rows = difference.more_rows
    doubt = f"too few rows to be sure, about {more_rows:,} more would do" if more_rows else "no change seen"
    return f"{value}{unit}, {doubt} (95 % interval {lower} to {upper})"


def rank_rows(base: Sequence[float], tuned: Sequence[float], order: str) -> list[int]:
    """Return row indices by the tuned model's `worst` or `best` score, or by the difference (`differ`)."""
    keys = {  # of a row
        "worst": lambda row: (tuned[row], tuned[row] - base[row]),
        "best": lambda row: (-tuned[row], base[row] - tuned[row]),
        "differ": lambda row: (-abs(tuned[row] - base[row]), tuned[row] - base[row]),
    }
    return sorted(range(len(tuned)), key=keys[order])
