"""Results of evaluations, and their files in a run."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from finetune.checksum import with_checksum
from finetune.evaluate.paired import Difference, format_difference
from finetune.files import parse_checked, read_object, remove_left_over, write_json
from finetune.run.directory import RunDirectory
from finetune.serialise import read_json_as
from finetune.units import format_measured

#: Scores of benchmark tasks, in a run's folder of evaluations.
TASKS_FILE = "tasks.json"


@dataclass(frozen=True)
class Score:
    """Means over rows, and the same row by row."""

    #: Share of rows answered exactly.
    exact_match: float | None
    #: Of a trained token, in nats; `perplexity` is the exponential.
    loss: float | None
    #: Of the rows with a prompt, like `exact` and `scores`.
    answers: list[str] = field(default_factory=list)
    perplexity: float | None = None
    exact: list[bool] = field(default_factory=list)
    #: Of all sequences, like `row_tokens` (trained tokens).
    row_losses: list[float] = field(default_factory=list)
    row_tokens: list[int] = field(default_factory=list)
    #: Share of trained tokens that are the likeliest.
    token_accuracy: float | None = None
    #: Of the chosen kind.
    score: float | None = None
    scores: list[float] = field(default_factory=list)
    #: Share of answers that are JSON, or whose calls can be read.
    valid: float | None = None
    #: Share of rows with each field right.
    fields: dict[str, float] = field(default_factory=dict)
    #: How much likelier the chosen answer of a pair is than the rejected answer, in nats.
    margins: list[float] = field(default_factory=list)
    pair_margin: float | None = None
    #: Share of pairs whose chosen answer is likelier.
    pairs_in_order: float | None = None
    #: Stand before the answers, and are not scored.
    thoughts: list[str] = field(default_factory=list)
    #: Answers that were stopped at the limit of tokens.
    cut: int = 0

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
    #: Name of the chosen score.
    score: str = "exact"
    score_difference: Difference | None = None
    #: File of the rows; None for held-out rows.
    data: str | None = None
    #: Rows of both models with an answer or loss from an earlier evaluation.
    reused: int = 0
    notes: list[str] = field(default_factory=list)
    #: The rows were held out by the first run, and `base` is the adapter that this run continued.
    forgetting: bool = False
    #: Sequences of `data` that the run was trained on.
    trained_rows: int = 0
    pairs_in_order_difference: Difference | None = None
    pair_margin_difference: Difference | None = None
    #: Of labelled answers: share of all pairs of a good and a bad answer in which the good answer has become likelier by more;
    #: one half if nothing was learned.
    labels_in_order: float | None = None
    #: `base` is the adapter that this run continued, its method's reference.
    against_adapter: bool = False
    #: Of the parts of a score of calls, over the rows that have the part.
    field_differences: dict[str, Difference] = field(default_factory=dict)
    #: Limit of thought and answer.
    max_new_tokens: int | None = None
    #: Ends the base model's prompts, to ask without a thought.
    base_prompt_end: str = ""
    #: Why the score was chosen, or empty.
    score_because: str = ""

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
    gaps = {**result, **({"token_accuracy_difference": result["score_difference"]} if score == "token accuracy" else {})}
    left_out = {"exact": ["score"], "token accuracy": ["score", "exact_match"]}.get(score, [])
    rows: list[tuple[str, bool, Any, Any, Any]] = [
        (title or score, is_share, base.get(name), tuned.get(name), gaps.get(f"{name}_difference"))
        for title, name, is_share in _MEASURES
        if name not in left_out and tuned.get(name) is not None
    ]
    gaps, fields = result.get("field_differences") or {}, tuned["fields"].items()
    rows[2:2] = [(f"{score}: {name}", True, base["fields"][name], share, gaps.get(name)) for name, share in fields]
    return [Measure(*row[:4], Difference(**row[4]) if row[4] else None) for row in rows]


@dataclass(frozen=True)
class Forgetting:
    """Loss of a trained token, in nats, before and after training."""

    rows_of: str
    rows: int
    #: Of the base model, or of the adapter that the run continued.
    before: float | None
    now: float | None
    #: Now minus before, with the 95 % interval of a paired bootstrap; None for fewer than two rows.
    difference: Difference | None = None

    def summary(self) -> str:
        """Return one line that says whether the loss rose."""
        verdict = ""
        if self.difference is not None and self.difference.is_significant:
            verdict = "; lost in part" if self.difference.value > 0 else "; nothing lost"
        losses = f"loss {format_measured(self.before)} before, {format_measured(self.now)} now"
        return f"{self.rows_of} ({self.rows:,}): {losses}{verdict}; {format_difference(self.difference)}"


@dataclass(frozen=True)
class NoCall:
    """Share of questions without need for a tool that are answered without a call."""

    rows: int
    before: float | None
    now: float | None
    difference: Difference | None = None

    @property
    def is_worse(self) -> bool:
        return self.difference is not None and self.difference.is_significant and self.difference.value < 0

    def summary(self) -> str:
        shares = f"{self.before or 0:.0%} before, {self.now or 0:.0%} now"
        shown = format_difference(self.difference, 100, " points")
        return f"questions with tools, none due ({self.rows}): answered without a call {shares}; {shown}"


@dataclass(frozen=True)
class TaskScore:
    """One metric of a task, by the harness's names."""

    task: str
    metric: str
    rows: int
    base: float | None
    tuned: float | None
    #: None where the task does not say.
    higher_is_better: bool | None = None
    #: Tuned minus base; None where rows have no number.
    difference: Difference | None = None

    @property
    def is_worse(self) -> bool:
        gap, sign = self.difference, {True: 1, False: -1, None: 0}[self.higher_is_better]
        return gap is not None and gap.is_significant and sign * gap.value < 0


def answers_without_thoughts(run: RunDirectory) -> bool:
    """Return whether the run's model can think, and all rows taught it not to."""
    report = read_object(run.data / "report.json") or {}
    findings = {finding["kind"]: finding["rows"] for finding in report.get("findings", ())}
    return 0 < report.get("rows_used", 0) <= findings.get("unthinking", 0)


def keep_result(run: RunDirectory, name: str, values: dict[str, Any]) -> None:
    """Write a result for reports, which leave it out if it can't be written."""
    path = run.path / "evaluations" / name
    with contextlib.suppress(OSError):
        remove_left_over(path)
        write_json(path, values, checksum=True)


def read_tasks(run: RunDirectory) -> list[TaskScore]:
    """Return a run's scores of benchmark tasks."""
    return read_json_as(run.path / "evaluations" / TASKS_FILE, list[TaskScore], "tasks") or []


def read_no_call(run: RunDirectory) -> NoCall | None:
    """Return the last measurement of needless calls, if any."""
    return read_json_as(run.path / "evaluations" / "no-call.json", NoCall)


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
    evaluations = {f"scores-{name}" for name in read_evaluations(run)}
    files = sorted((run.path / "evaluations").glob("*.json"))
    names = [
        path.name for path in files
        if (path.stem not in evaluations if path.stem.startswith("scores-") else read_object(path) is None)
    ]  # fmt: skip
    return f"{', '.join(names)} can't be read; measure again: finetune eval {run.path.name}" if names else ""


def _is_consistent(comparison: Comparison) -> bool:
    base, tuned = comparison.base, comparison.tuned
    shown = min(map(len, (comparison.prompts, comparison.references, base.answers, tuned.answers)))
    same_rows = len(base.scores) == len(tuned.scores) and set(base.fields) >= set(tuned.fields)
    return same_rows and len(tuned.scores) <= shown and len(tuned.row_losses) == len(tuned.row_tokens)


def read_forgetting(run: RunDirectory) -> list[Forgetting]:
    """Return the last measurement of forgetting."""
    return read_json_as(run.path / "evaluations" / "lost.json", list[Forgetting], "groups") or []


class Journal:
    """Computed answers and losses by a digest of the row, in a file: for killed evaluations and other scores."""

    def __init__(self, folder: Path, model: str, inputs: Any) -> None:
        # RUN/evaluations/<model>-<key>.jsonl; the key covers all that decides an answer except the row
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
            with self._path.open("ab", buffering=0) as file:  # begins with a new line: the last one may be incomplete
                file.write(b"\n" + lines.encode())
        except OSError as error:
            self.problem = f"answers are not kept for a later evaluation: {error}"


def digest(values: Any) -> str:
    """Return a short hash of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:24]
