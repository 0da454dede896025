"""The rows of an evaluation: those that a run held out, or those of a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finetune.bundled import PROBE
from finetune.data.checks import BadRow
from finetune.data.examples import read_examples
from finetune.data.formats import Example
from finetune.data.questions import questions_of
from finetune.data.report import Refused, refusal_lines
from finetune.data.tokens import Encoder
from finetune.errors import DataError
from finetune.recipe import DatasetRecipe
from finetune.run.origin import HELD_OUT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.recipe import Settings
    from finetune.run.directory import RunDirectory


@dataclass(frozen=True)
class EvalRows:
    """`prompts`, their tokens, and the expected answers; `ids` and `labels` of the sequences whose loss is computed.

    A row of plain text has no prompt, and a chat template may make several sequences of a row.
    """

    prompts: list[str] = field(default_factory=list)
    prompt_ids: list[list[int]] = field(default_factory=list)
    references: list[str] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    labels: list[list[int]] = field(default_factory=list)


def held_out(run: RunDirectory, most: int | None, *, first: bool = False) -> EvalRows:
    """At most so many of the run's held-out rows, or of the `first` run's from whose adapter it went on.

    Raises DataError when there are none.
    """
    folder = run.origin / HELD_OUT if first else run.data
    if first and not folder.is_dir():
        raise DataError(
            f"{run.path} has no held-out rows of a run that it went on from", "Leave out --forgetting, or give --data FILE."
        )
    questions = json.loads((folder / "eval_examples.json").read_text(encoding="utf-8"))[:most]
    ids: list[list[int]] = []
    labels: list[list[int]] = []
    if (folder / "eval").is_dir():
        from datasets import load_from_disk

        tokenised: Any = load_from_disk(str(folder / "eval"))
        chosen = tokenised.select(range(min(len(tokenised), most or len(tokenised))))
        ids, labels = list(chosen["input_ids"]), list(chosen["labels"])
    if not questions and not ids:
        raise DataError(
            f"{run.path} has no held-out rows",
            "Give rows of your own: --data FILE. Or set dataset.eval_path=FILE or dataset.test_split_size=0.1 and run again.",
        )
    return _rows(questions, ids, labels)


def own(path: str, settings: Settings, tokenizer: PreTrainedTokenizerBase, most: int | None) -> EvalRows:
    """At most so many rows of a file, read as the run's data was. Raises DataError for what can't be read."""
    dataset = DatasetRecipe(
        path=path, columns=settings.dataset.columns, ignore_columns=settings.dataset.ignore_columns, max_rows=most
    )
    found = read_examples(dataset).train
    encoder = Encoder(
        tokenizer,
        conversations=any(example.messages for example in found.examples),
        train_on_inputs=settings.train_on_inputs,
    )
    encoded = encoder.encode(found.examples)
    paired = list(zip(found.examples, encoded, strict=True))
    refused = [*found.refused]
    refused += [Refused(row.file, row.row, bad.field, bad.reason) for row, bad in paired if isinstance(bad, BadRow)]
    if refused and settings.dataset.on_bad_rows == "fail":
        raise DataError(refusal_lines(refused, found.read), "Correct these rows.")
    usable = [row for row, made in paired if not isinstance(made, BadRow)]
    if not usable:
        raise DataError(f"{path}: no row can be used", "Use a file with prompts and answers.")
    sequences = [one for made in encoded if not isinstance(made, BadRow) for one in made]
    ids, labels = ([getattr(one, name).tolist() for one in sequences] for name in ("input_ids", "labels"))
    return _rows(questions_of(usable, tokenizer), ids, labels)


def probe(tokenizer: PreTrainedTokenizerBase, most: int | None = None) -> EvalRows:
    """At most so many of the bundled general questions, asked with the tokenizer's chat template where it has one."""
    lines = PROBE.read_text(encoding="utf-8").splitlines()[:most]
    examples = [_question(json.loads(line), tokenizer.chat_template is not None) for line in lines]
    encoded = Encoder(tokenizer, conversations=tokenizer.chat_template is not None).encode(examples)
    sequences = [one for made in encoded if not isinstance(made, BadRow) for one in made]
    ids, labels = ([getattr(one, name).tolist() for one in sequences] for name in ("input_ids", "labels"))
    return EvalRows(ids=ids, labels=labels)


def _question(row: dict[str, str], as_conversation: bool) -> Example:
    if not as_conversation:
        return Example(PROBE.name, 0, prompt=f"{row['prompt']}\n", completion=row["completion"])
    messages = {"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}
    return Example(PROBE.name, 0, messages=messages, answers=(1,))


def _rows(questions: list[dict[str, Any]], ids: list[list[int]], labels: list[list[int]]) -> EvalRows:
    prompts, prompt_ids, answers = ([row[name] for row in questions] for name in ("prompt", "prompt_ids", "answer"))
    return EvalRows(prompts, prompt_ids, answers, ids, labels)
