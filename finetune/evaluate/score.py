"""Scores of base and tuned model on held-out rows: exact match of greedy answers, and loss on the trained tokens."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from datasets import load_from_disk

from finetune.errors import DataError
from finetune.evaluate.answerer import Answerer
from finetune.evaluate.paired import Difference, difference
from finetune.run.directory import require_data

if TYPE_CHECKING:
    from finetune.run.directory import RunDirectory

#: Prompt and answer tokens of the rows that are answered at once. On a card their KV cache is 2 GiB in an 8B with grouped
#: keys; a processor is slower with more than its caches hold, and a small batch ends early.
_ANSWERED_TOKENS = {"cpu": 8_192, "cuda": 16_384}
#: Tokens of the rows whose loss is computed at once, fewer where their logits would be more than 256 MiB in float32.
_LOSS_TOKENS, _LOGITS = 1_024, 64 * 2**20
_LARGEST_LOSS = 700.0  # whose exponential is a float


@dataclass(frozen=True)
class Score:
    """Share of rows answered exactly, mean loss per trained token (nats) and its exponential, and the same row by row.

    `answers` and `exact` have the rows with a prompt; `row_losses` and `row_tokens` (trained tokens) all rows.
    """

    exact_match: float | None
    loss: float | None
    answers: list[str] = field(default_factory=list)
    perplexity: float | None = None
    exact: list[bool] = field(default_factory=list)
    row_losses: list[float] = field(default_factory=list)
    row_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """Scores of base and tuned model on the same rows; a difference is tuned minus base, None for fewer than two rows."""

    rows: int
    base: Score
    tuned: Score
    prompts: list[str]
    references: list[str]
    seconds: float
    exact_match_difference: Difference | None = None
    loss_difference: Difference | None = None

    def as_json(self) -> dict[str, Any]:
        """All fields as a dict, e.g. `base.exact_match`."""
        return asdict(self)


def compare(
    run: RunDirectory, *, rows: int | None = None, last: bool = False, progress: Callable[[str], None] = lambda _: None
) -> Comparison:
    """Score a run's held-out rows with the result or, if `last`, with the last step's adapter beside it.

    Raises DataError when there are no such rows, RecipeError when there is no such adapter.
    """
    began = time.perf_counter()
    require_data(run)
    examples = json.loads((run.data / "eval_examples.json").read_text(encoding="utf-8"))[:rows]
    if not examples:
        raise DataError(
            f"{run.path} has no held-out rows", "Set dataset.eval_path=FILE or dataset.test_split_size=0.1 and run again."
        )
    progress("loading base model and adapter")
    answerer = Answerer(run, last=last)
    prompts, references = [example["prompt"] for example in examples], [example["answer"] for example in examples]
    questions = [example["prompt_ids"] for example in examples]
    tokenised = load_from_disk(str(run.data / "eval")) if (run.data / "eval").is_dir() else None
    with answerer.as_base():
        progress("base model")
        base = _score(answerer, questions, references, tokenised, rows)
    progress("tuned model")
    tuned = _score(answerer, questions, references, tokenised, rows)
    matches = difference(base.exact, tuned.exact, span=1.0) if len(examples) > 1 else None
    losses = (
        difference(base.row_losses, tuned.row_losses, base.row_tokens)
        if len(base.row_losses) > 1 and any(base.row_tokens)
        else None
    )
    return Comparison(len(examples), base, tuned, prompts, references, time.perf_counter() - began, matches, losses)


def _score(answerer: Answerer, questions: list[list[int]], references: list[str], tokenised: Any, rows: int | None) -> Score:
    new = max(len(answerer.tokenizer(reference, add_special_tokens=False)["input_ids"]) for reference in references) + 16
    answers = [""] * len(questions)
    for batch in batches([len(question) + new for question in questions], _ANSWERED_TOKENS[answerer.device]):
        made = answerer.answer([questions[index] for index in batch], max_new_tokens=new)
        for index, answer in zip(batch, made, strict=True):
            answers[index] = answer
    exact = [answer.strip() == reference.strip() for answer, reference in zip(answers, references, strict=True)]
    losses, tokens = _losses(answerer, tokenised, rows)
    loss = sum(each * count for each, count in zip(losses, tokens, strict=True)) / sum(tokens) if any(tokens) else None
    perplexity = math.exp(loss) if loss is not None and loss < _LARGEST_LOSS else None
    return Score(sum(exact) / len(exact), loss, answers, perplexity, exact, losses, tokens)


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
def _losses(answerer: Answerer, tokenised: Any, rows: int | None) -> tuple[list[float], list[int]]:
    """Mean negative log-likelihood of each row's trained tokens, 0 without any, and their number."""
    if tokenised is None:
        return [], []
    chosen = tokenised.select(range(min(len(tokenised), rows or len(tokenised))))
    every_ids, every_labels = chosen["input_ids"], chosen["labels"]
    vocabulary = answerer.model.get_input_embeddings().num_embeddings
    losses, tokens = [0.0] * len(chosen), [0] * len(chosen)
    for batch in batches([len(ids) for ids in every_ids], min(_LOSS_TOKENS, _LOGITS // vocabulary)):
        ids = _padded([every_ids[index] for index in batch], 0, answerer.device)
        mask = _padded([[1] * len(every_ids[index]) for index in batch], 0, answerer.device)
        labels = _padded([every_labels[index] for index in batch], -100, answerer.device)[:, 1:]
        trained = labels != -100
        logits = answerer.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1][trained].float()
        each = torch.nn.functional.cross_entropy(logits, labels[trained], reduction="none")
        counts = trained.sum(dim=1).tolist()
        for index, count, of_row in zip(batch, counts, each.split(counts), strict=True):
            losses[index], tokens[index] = (of_row.sum().item() / count if count else 0.0), count
    return losses, tokens


def _padded(rows: list[list[int]], value: int, device: str) -> torch.Tensor:
    """Rows as one tensor, filled up on the right."""
    width = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (width - len(row)) for row in rows], device=device)
