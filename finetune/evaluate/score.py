"""Scores of base and tuned model on the same rows: greedy answers, and loss on the trained tokens."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.tokenizer import run_tokenizer
from finetune.errors import DataError, OutOfMemory
from finetune.evaluate.answerer import Answerer, adapter_folder, answer_facts, longest
from finetune.evaluate.journal import Journal, digest
from finetune.evaluate.paired import Difference, difference
from finetune.evaluate.room import halving, tokens_at_once
from finetune.evaluate.rows import EvalRows, held_out, own
from finetune.evaluate.scores import Marked, Scorer, scorer
from finetune.files import remove_left_over, write_json
from finetune.plan.plan import read_plan
from finetune.run.directory import require_data
from finetune.units import format_seconds

if TYPE_CHECKING:
    from finetune.run.directory import RunDirectory

Progress = Callable[[str], None]
#: Tokens of the rows whose loss is computed at once, fewer where their logits would be more than 256 MiB in float32.
_LOSS_TOKENS, _LOGITS = 1_024, 64 * 2**20
_LARGEST_LOSS = 700.0  # whose exponential is a float
_SAID_S = 1.0  # between two lines of progress


@dataclass(frozen=True)
class Score:
    """Means over rows, and the same row by row.

    `exact_match`: share of rows answered exactly. `loss`: of a trained token, in nats; `perplexity` is its exponential.
    `token_accuracy`: share of trained tokens that are the likeliest. `score`: of the chosen kind; of JSON, `valid` is the share
    of answers that are JSON and `fields` the share of rows with each field right. `answers`, `exact` and `scores` have the rows
    with a prompt; `row_losses` and `row_tokens` (trained tokens) all sequences.
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


@dataclass(frozen=True)
class Comparison:
    """Scores of base and tuned model on the same rows; a difference is tuned minus base, None for fewer than two rows.

    `forgetting`: the rows are those that the first run held out, and `base` is the adapter from which this run went on.
    `score`: name of the chosen score. `data`: file of the rows, None for held-out ones. `reused`: rows of both models whose
    answer or loss was there from an earlier evaluation.
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

    def as_json(self) -> dict[str, Any]:
        """All fields as a dict, e.g. `base.exact_match`."""
        return asdict(self)


def compare(
    run: RunDirectory,
    *,
    rows: int | None = None,
    last: bool = False,
    score: Scorer | None = None,
    data: str | None = None,
    forgetting: bool = False,
    load: Callable[[], Answerer] | None = None,
    progress: Progress = lambda _: None,
) -> Comparison:
    """Score held-out rows, or those of the file `data`, with the result or, if `last`, the last step's adapter beside it.

    With `forgetting`, the held-out rows of the run that this one went on from, with that adapter and with the result.
    `load`: gives an answerer that is loaded already, or loads it.

    Raises DataError when there are no such rows or the score can't be computed for one, RecipeError when there is no such
    adapter, OutOfMemory when one row alone does not fit. Killed and called again, it goes on with the rows that are left.
    """
    began = time.perf_counter()
    require_data(run)
    chosen = score or scorer("exact")
    plan = read_plan(run.plan)
    tokenizer = run_tokenizer(run.data / "tokenizer", plan.settings)
    found = held_out(run, rows, first=forgetting) if data is None else own(data, plan.settings, tokenizer, rows)
    if chosen.name != "loss":
        _check(found, chosen)
    folder = adapter_folder(run, last=last)

    @functools.cache
    def load_now() -> Answerer:
        progress("loading base model and adapter")
        return Answerer(run, last=last, others={"origin": run.origin} if forgetting else None)

    new = longest(tokenizer, found.references) + 16 if chosen.name != "loss" else None
    first = ("origin", run.origin) if forgetting else ("base", None)
    journals = [
        Journal(run.path / "evaluations", model, answer_facts(run, plan, adapter))
        for model, adapter in (first, ("tuned", folder))
    ]
    load = load or load_now
    base_made = Made(load, journals[0], found, first[0], new, progress)
    tuned_made = Made(load, journals[1], found, "tuned", new, progress)
    base, tuned = base_made.scored(chosen), tuned_made.scored(chosen)
    enough = len(base.scores) > 1
    made = Comparison(
        len(found.prompts) if base.answers else len(found.ids), base, tuned, found.prompts, found.references,
        time.perf_counter() - began,
        difference(base.exact, tuned.exact, span=1.0) if enough else None,
        difference(base.row_losses, tuned.row_losses, base.row_tokens)
        if len(base.row_losses) > 1 and any(base.row_tokens) else None,
        chosen.name, difference(base.scores, tuned.scores, span=_span(chosen, base, tuned)) if enough else None,
        data, base_made.reused + tuned_made.reused, sorted({journal.problem for journal in journals} - {""}),
        forgetting,
    )  # fmt: skip
    if not made.notes:
        kinds = ["-last" if last else "", "-forgetting" if forgetting else "", f"-{digest(data)}" if data else ""]
        path = run.path / "evaluations" / f"scores-{chosen.name}{''.join(kinds)}.json"
        with contextlib.suppress(OSError):  # for reports; without room there is none of this evaluation
            remove_left_over(path)
            write_json(path, made.as_json())
    return made


def _span(chosen: Scorer, base: Score, tuned: Score) -> float:
    """The largest difference of two rows' scores; of a user's function, between those that were seen."""
    seen = [*base.scores, *tuned.scores]
    return max(seen) - min(seen) if chosen.span is None else chosen.span


def _check(rows: EvalRows, chosen: Scorer) -> None:
    """Score each expected answer as if it were the model's: what can't be scored is said before anything is loaded."""
    if not rows.prompts:
        raise DataError("no row has a prompt and an answer: they are plain text", "Use --score loss.")
    problems, fix = [], ""
    for number, (prompt, reference) in enumerate(zip(rows.prompts, rows.references, strict=True), 1):
        try:
            chosen.mark(prompt, reference, reference)
        except DataError as error:
            problems.append(f"row {number}: {error.problems[0]}")
            fix = error.fix
    if problems:
        more = [f"and {len(problems) - 5:,} other row(s)"] if len(problems) > 5 else []
        raise DataError([*problems[:5], *more], fix)


class Made:
    """Answers and losses of one model, from an earlier evaluation or made now, when the model is loaded.

    `new`: the most tokens of an answer, None without answers.
    """

    def __init__(
        self, load: Callable[[], Answerer], journal: Journal, rows: EvalRows, model: str, new: int | None, progress: Progress
    ) -> None:
        self._load, self._journal, self._rows = load, journal, rows
        self._say, self._model, self._new = progress, model, new
        self.reused = 0
        self._questions = [digest([ids, new]) for ids in rows.prompt_ids] if new else []
        self._sequences = [digest([ids, labels]) for ids, labels in zip(rows.ids, rows.labels, strict=True)]
        self._each(self._questions, [len(ids) + (new or 0) for ids in rows.prompt_ids], self._answer, "answered")
        self._each(self._sequences, [len(ids) for ids in rows.ids], self._lose, "read")

    def _at_once(self, verb: str) -> int:
        """Tokens of a batch."""
        answerer = self._load()
        if verb == "answered":
            return tokens_at_once(answerer.model, answerer.device, answerer.plan.budget_bytes)
        return min(_LOSS_TOKENS, _LOGITS // answerer.model.get_input_embeddings().num_embeddings)

    def _each(self, keys: list[str], lengths: list[int], work: Callable[[list[int]], None], verb: str) -> None:
        """Work on the batches with a row that is not known yet. The batches are those of the evaluation that was killed."""
        known = self._journal.known
        if all(key in known for key in keys):
            self.reused += len(keys)
            return
        left = [batch for batch in batches(lengths, self._at_once(verb)) if any(keys[row] not in known for row in batch)]
        done = first = len(keys) - sum(map(len, left))
        self.reused += done
        began, said = time.monotonic(), 0.0
        with self._load().using(self._model):
            for batch in left:
                now = time.monotonic()
                if now - said > _SAID_S:
                    ahead = format_seconds((now - began) / (done - first) * (len(keys) - done)) if done > first else ""
                    rest = f", about {ahead} left" if ahead else ""
                    self._say(f"{self._model} model: {done:,} of {len(keys):,} rows {verb}{rest}")
                    said = now
                try:
                    halving(batch, work)
                except torch.OutOfMemoryError:
                    raise OutOfMemory(
                        f"one row of {max(lengths[row] for row in batch):,} tokens does not fit beside the model",
                        "Leave long rows out, or close other programs.",
                    ) from None
                done += len(batch)

    def _answer(self, batch: list[int]) -> None:
        made = self._load().answer([self._rows.prompt_ids[row] for row in batch], max_new_tokens=self._new or 1)
        self._journal.add({self._questions[row]: {"answer": answer} for row, answer in zip(batch, made, strict=True)})

    def _lose(self, batch: list[int]) -> None:
        chosen = [self._rows.ids[row] for row in batch], [self._rows.labels[row] for row in batch]
        made = losses(self._load().model, *chosen, self._load().device)
        self._journal.add({self._sequences[row]: entry for row, entry in zip(batch, made, strict=True)})

    def scored(self, chosen: Scorer) -> Score:
        """The scores of this model."""
        known, rows = self._journal.known, self._rows
        lost = [known[key] for key in self._sequences]
        every_loss, tokens = [entry["loss"] for entry in lost], [entry["tokens"] for entry in lost]
        loss = sum(each * count for each, count in zip(every_loss, tokens, strict=True)) / sum(tokens) if any(tokens) else None
        answers = [known[key]["answer"] for key in self._questions]
        marked = [
            chosen.mark(prompt, reference, answer)
            for prompt, reference, answer in zip(rows.prompts, rows.references, answers, strict=False)
        ]
        exact = [answer.strip() == reference.strip() for answer, reference in zip(answers, rows.references, strict=False)]
        scores = [one.score for one in marked]
        validity = [one.valid for one in marked if one.valid is not None]
        return Score(
            _mean(exact), loss, answers,
            math.exp(loss) if loss is not None and loss < _LARGEST_LOSS else None, exact, every_loss, tokens,
            sum(entry["right"] for entry in lost) / sum(tokens) if any(tokens) else None, _mean(scores), scores,
            _mean(validity), _by_field(marked),
        )  # fmt: skip


def _mean(values: list[Any]) -> float | None:
    return sum(values) / len(values) if values else None


def _by_field(marked: list[Marked]) -> dict[str, float]:
    """Share of the rows with a field in which it is right, in the order of the fields."""
    found: dict[str, list[bool]] = {}
    for one in marked:
        for name, right in one.fields.items():
            found.setdefault(name, []).append(right)
    return {name: sum(rights) / len(rights) for name, rights in found.items()}


def batches(lengths: list[int], most: int) -> list[list[int]]:
    """Indices of rows, longest first, in batches of at most `most` tokens with their padding; a longer row is alone."""
    made: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if made and (len(made[-1]) + 1) * lengths[made[-1][0]] <= most:
            made[-1].append(index)
        else:
            made.append([index])
    return made


@torch.inference_mode()
def losses(model: Any, every_ids: list[list[int]], every_labels: list[list[int]], device: str) -> list[dict[str, Any]]:
    """Of each row, as one batch: mean negative log-likelihood of its trained tokens (0 without any), their number, and how many
    of them are the likeliest token."""
    ids = _padded(every_ids, 0, device)
    mask = _padded([[1] * len(row) for row in every_ids], 0, device)
    labels = _padded(every_labels, -100, device)[:, 1:]
    trained = labels != -100
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1][trained].float()
    each = torch.nn.functional.cross_entropy(logits, labels[trained], reduction="none")
    right = logits.argmax(dim=-1) == labels[trained]
    counts = trained.sum(dim=1).tolist()
    return [
        {"loss": of_row.sum().item() / count if count else 0.0, "tokens": count, "right": int(of_right.sum())}
        for count, of_row, of_right in zip(counts, each.split(counts), right.split(counts), strict=True)
    ]


def _padded(rows: list[list[int]], value: int, device: str) -> torch.Tensor:
    """Rows as one tensor, filled up on the right."""
    width = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (width - len(row)) for row in rows], device=device)
