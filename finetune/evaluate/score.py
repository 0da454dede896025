"""Scores of base and tuned model on held-out rows: exact match of greedy answers, and loss on the trained tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from datasets import load_from_disk

from finetune.errors import DataError
from finetune.evaluate.answerer import Answerer
from finetune.run.directory import require_data

if TYPE_CHECKING:
    from finetune.run.directory import RunDirectory

_BATCH_ROWS = 32


@dataclass(frozen=True)
class Score:
    """Share of rows answered exactly, mean loss per trained token (nats), and the answers."""

    exact_match: float | None
    loss: float | None
    answers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """Scores of base and tuned model on the same rows."""

    rows: int
    base: Score
    tuned: Score
    prompts: list[str]
    references: list[str]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """All fields as a dict, e.g. `base.exact_match`."""
        return asdict(self)


def compare(run: RunDirectory, *, rows: int | None = None, progress: Callable[[str], None] = lambda _: None) -> Comparison:
    """Score a run's held-out rows. Raises DataError when it has none, RecipeError when it has no adapter yet."""
    began = time.perf_counter()
    require_data(run)
    examples = json.loads((run.data / "eval_examples.json").read_text(encoding="utf-8"))[:rows]
    if not examples:
        raise DataError(
            f"{run.path} has no held-out rows", "Set dataset.eval_path=FILE or dataset.test_split_size=0.1 and run again."
        )
    progress("loading base model and adapter")
    answerer = Answerer(run)
    prompts, references = [example["prompt"] for example in examples], [example["answer"] for example in examples]
    questions = [example["prompt_ids"] for example in examples]
    tokenised = load_from_disk(str(run.data / "eval")) if (run.data / "eval").is_dir() else None
    with answerer.as_base():
        progress("base model")
        base = _score(answerer, questions, references, tokenised, rows)
    progress("tuned model")
    tuned = _score(answerer, questions, references, tokenised, rows)
    return Comparison(len(examples), base, tuned, prompts, references, time.perf_counter() - began)


def _score(answerer: Answerer, questions: list[list[int]], references: list[str], tokenised: Any, rows: int | None) -> Score:
    longest = max(len(answerer.tokenizer(reference, add_special_tokens=False)["input_ids"]) for reference in references)
    answers: list[str] = []
    for begin in range(0, len(questions), _BATCH_ROWS):
        answers += answerer.answer(questions[begin : begin + _BATCH_ROWS], max_new_tokens=longest + 16)
    exact = sum(answer.strip() == reference.strip() for answer, reference in zip(answers, references, strict=True)) / len(
        references
    )
    return Score(exact, _loss(answerer, tokenised, rows), answers)


@torch.inference_mode()
def _loss(answerer: Answerer, tokenised: Any, rows: int | None) -> float | None:
    """Mean negative log-likelihood of the trained tokens, row by row, so that a batch's logits are never in memory."""
    if tokenised is None:
        return None
    total, count = 0.0, 0
    for row in tokenised.select(range(min(len(tokenised), rows or len(tokenised)))):
        ids = torch.tensor([row["input_ids"]], device=answerer.device)
        labels = torch.tensor([row["labels"]], device=answerer.device)[:, 1:]
        logits = answerer.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        total += torch.nn.functional.cross_entropy(logits[0], labels[0], ignore_index=-100, reduction="sum").item()
        count += int((labels != -100).sum())
    return total / count if count else None
