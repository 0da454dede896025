"""Results of evaluations, and the files of a run that have them: whatever is no result is left out."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from finetune.evaluate.paired import Difference, format_difference
from finetune.files import read_object, remove_left_over, write_json
from finetune.run.directory import RunDirectory
from finetune.serialise import read_own
from finetune.units import format_measured

#: Scores of benchmark tasks, in a run's folder of evaluations.
TASKS_FILE = "tasks.json"


@dataclass(frozen=True)
class Score:
    """Means over rows, and the same row by row.

    `exact_match`: share of rows answered exactly. `loss`: of a trained token, in nats; `perplexity` is its exponential.
    `token_accuracy`: share of trained tokens that are the likeliest. `score`: of the chosen kind; of JSON, `valid` is the share
    of answers that are JSON and `fields` the share of rows with each field right. `answers`, `exact` and `scores` have the rows
    with a prompt; `row_losses` and `row_tokens` (trained tokens) all sequences. `thoughts` stand before the answers and are not
    scored; `cut`: answers that were stopped at the limit of tokens.

    Of pairs: `margins` are how much likelier the chosen answer is than the rejected one, in nats, `pair_margin` is their mean,
    and `pairs_in_order` the share of pairs in which it is likelier.
    """

    exact_match: float | None
    loss: float | None
    answers: list[str] = field(default_factory=list)
    perplexity: float | None = None
    exact: list[bool] = field(default_factory=list)
    row_losses: list[float] = field(default_factory=list)
    row_tokens: list[int] = field(default_factory=list)
    token_accuracy: float | None = None
    score: float | None = None
    scores: list[float] = field(default_factory=list)
    valid: float | None = None
    fields: dict[str, float] = field(default_factory=dict)
    margins: list[float] = field(default_factory=list)
    pair_margin: float | None = None
    pairs_in_order: float | None = None
    thoughts: list[str] = field(default_factory=list)
    cut: int = 0

    @property
    def in_order(self) -> list[bool]:
        return [margin > 0 for margin in self.margins]


@dataclass(frozen=True)
class Comparison:
    """Scores of base and tuned model on the same rows; a difference is tuned minus base, None for fewer than two rows.

    `forgetting`: the rows were held out by the first run, and `base` is the adapter that this run continued.
    `score`: name of the chosen score. `data`: file of the rows, None for held-out ones. `reused`: rows of both models with an
    answer or loss from an earlier evaluation. `trained_rows`: sequences of `data` that the run was trained on.
    `labels_in_order`: of answers that are marked good or bad, the share of all pairs of a good and a bad one in which the good
    one has become likelier by more; one half if nothing was learned. `against_adapter`: `base` is the adapter that this run
    continued, its method's reference.
    `field_differences`: of the parts of a score of calls, over the rows that have the part.
    `max_new_tokens`: limit of thought and answer. `base_prompt_end`: ends the base model's prompts, to ask without a thought.
    `score_because`: why, or empty.
    """

    rows: int
    base: Score
    tuned: Score
    prompts: list[str]
    references: list[str]
    seconds: float
    exact_match_difference: Difference | None = None
    loss_difference: Difference | None = None
    score: str = "exact"
    score_difference: Difference | None = None
    data: str | None = None
    reused: int = 0
    notes: list[str] = field(default_factory=list)
    forgetting: bool = False
    trained_rows: int = 0
    pairs_in_order_difference: Difference | None = None
    pair_margin_difference: Difference | None = None
    labels_in_order: float | None = None
    against_adapter: bool = False
    field_differences: dict[str, Difference] = field(default_factory=dict)
    max_new_tokens: int | None = None
    base_prompt_end: str = ""
    score_because: str = ""


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
    """The figures of a `Comparison`, given as a dictionary."""
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
    """Loss of a trained token, in nats, on `rows` rows.

    `before`: of the base model, or of the adapter that the run continued. `difference`: now minus before, with the 95 %
    interval of a paired bootstrap; None for fewer than two rows.
    """

    rows_of: str
    rows: int
    before: float | None
    now: float | None
    difference: Difference | None = None

    def summary(self) -> str:
        """One line, with whether the loss rose."""
        verdict = ""
        if self.difference is not None and self.difference.is_significant:
            verdict = "; lost in part" if self.difference.value > 0 else "; nothing lost"
        losses = f"loss {format_measured(self.before)} before, {format_measured(self.now)} now"
        return f"{self.rows_of} ({self.rows:,}): {losses}{verdict}; {format_difference(self.difference)}"


@dataclass(frozen=True)
class NoCall:
    """Share of questions without need for a tool that are answered without a call, before and after training."""

    rows: int
    before: float | None
    now: float | None
    difference: Difference | None = None

    @property
    def is_worse(self) -> bool:
        """Whether the tuned model calls tools where the base model did not, beyond doubt."""
        return self.difference is not None and self.difference.is_significant and self.difference.value < 0

    def summary(self) -> str:
        shares = f"{self.before or 0:.0%} before, {self.now or 0:.0%} now"
        shown = format_difference(self.difference, 100, " points")
        return f"questions with tools, none due ({self.rows}): answered without a call {shares}; {shown}"


@dataclass(frozen=True)
class TaskScore:
    """One metric of a task, by the harness's names. `difference`: tuned minus base, None where rows have no number.

    `rows`: of the task that were scored. `higher_is_better`: None where the task does not say.
    """

    task: str
    metric: str
    rows: int
    base: float | None
    tuned: float | None
    higher_is_better: bool | None = None
    difference: Difference | None = None

    @property
    def is_worse(self) -> bool:
        """Whether the tuned model is worse beyond doubt."""
        gap, sign = self.difference, {True: 1, False: -1, None: 0}[self.higher_is_better]
        return gap is not None and gap.is_significant and sign * gap.value < 0


def answers_without_thoughts(run: RunDirectory) -> bool:
    """Whether the run's model can think and all rows taught it to answer without a thought, by its data report."""
    report = read_object(run.data / "report.json") or {}
    findings = {finding["kind"]: finding["rows"] for finding in report.get("findings", ())}
    return 0 < report.get("rows_used", 0) <= findings.get("unthinking", 0)


def keep_result(run: RunDirectory, name: str, values: dict[str, Any]) -> None:
    """Write a file of the run's evaluations for reports, which leave it out if it can't be written."""
    path = run.path / "evaluations" / name
    with contextlib.suppress(OSError):
        remove_left_over(path)
        write_json(path, values, checksum=True)


def read_tasks(run: RunDirectory) -> list[TaskScore]:
    """The scores of benchmark tasks that a run has."""
    return read_own(run.path / "evaluations" / TASKS_FILE, list[TaskScore], "tasks") or []


def read_no_call(run: RunDirectory) -> NoCall | None:
    """The last measurement of calls where none is due; None without one."""
    return read_own(run.path / "evaluations" / "no-call.json", NoCall)


def read_evaluations(run: RunDirectory) -> dict[str, dict[str, Any]]:
    """The evaluations that a run has, from the page or the command line, by the name of their file."""
    evaluations = {}
    for path in sorted((run.path / "evaluations").glob("scores-*.json")):
        comparison = read_own(path, Comparison)
        if comparison and _is_consistent(comparison):
            evaluations[path.stem.removeprefix("scores-")] = asdict(comparison)
    return evaluations


def unreadable_evaluations(run: RunDirectory) -> str:
    """A sentence that names the files of the run's evaluations that can't be read, or have changed since they were written;
    empty without any."""
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
    """Forgetting as the last evaluation measured it."""
    return read_own(run.path / "evaluations" / "lost.json", list[Forgetting], "groups") or []
