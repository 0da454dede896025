"""From `recipe.dataset` to the trainer's datasets, with a report on every row."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.checks import BadRow
from finetune.data.examples import Examples, Rows, read_examples
from finetune.data.findings import find
from finetune.data.formats import Example
from finetune.data.report import DataReport, Refused, percentiles, refusal_lines
from finetune.data.tokens import NOT_TRAINED, Encoded, Encoder
from finetune.errors import DataError
from finetune.recipe import Recipe

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int], None]
_BATCH = 256


@dataclass
class PreparedData:
    """The trainer's datasets and their report.

    `train` and `eval` have columns input_ids and labels (-100 where not trained on), one sequence per row, none longer than
    max_length. `lengths` are tokens per training sequence, in order. `examples` and `eval_examples` are the source rows; exact
    match prompts with an Example's `question()` and expects its `reference()`.
    """

    train: Dataset
    eval: Dataset | None
    report: DataReport
    eval_report: DataReport | None
    fingerprint: str
    lengths: list[int]
    eval_lengths: list[int]
    examples: list[Example]
    eval_examples: list[Example]


@dataclass
class _Side:
    """One split (training or held out) while it is built."""

    rows: Rows
    sequences: list[Encoded] = field(default_factory=list)
    used: list[Example] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    too_long: list[tuple[Example, int]] = field(default_factory=list)
    truncated: int = 0
    tokens_dropped: int = 0
    noted: dict[str, list[Example]] = field(default_factory=dict)

    def add(self, example: Example, result: list[Encoded] | BadRow, max_length: int | None, excess: str) -> None:
        """Add one row, or record why it is left out."""
        if isinstance(result, BadRow):
            self.refused.append(Refused(example.file, example.row, result.field, result.reason))
            return
        longest = max(len(one.input_ids) for one in result)
        if max_length is not None and longest > max_length:
            if excess == "truncate" and (bad := _cut_away(result, max_length)):
                self.refused.append(Refused(example.file, example.row, None, bad))
                return
            self.too_long.append((example, longest))
            kept = max_length if excess == "truncate" else 0
            self.tokens_dropped += sum(len(one.input_ids) - min(kept, len(one.input_ids)) for one in result)
            if excess != "truncate":
                return
            self.truncated += 1
        for note in {note for one in result for note in one.notes} | ({"unrolled"} if len(result) > 1 else set()):
            self.noted.setdefault(note, []).append(example)
        self.used.append(example)
        self.sequences += [Encoded(one.input_ids[:max_length], one.labels[:max_length]) for one in result]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(one.input_ids) for one in self.sequences]

    def dataset(self) -> Dataset:
        """The sequences as a dataset in memory."""
        import pyarrow as pa
        from datasets import Dataset

        empty = np.array([], dtype=np.int32)
        offsets = pa.array(np.cumsum([0, *self.lengths]).astype(np.int32))
        columns = {
            name: np.concatenate([empty, *(getattr(one, name) for one in self.sequences)]) for name in ("input_ids", "labels")
        }
        return Dataset.from_dict(
            {name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in columns.items()}
        )


@dataclass
class EncodedRows:
    """Every row of a recipe's dataset as tokens, or why it has none, before max_length applies. Expensive to make; `within` is
    cheap."""

    examples: Examples
    encoder: Encoder
    sides: list[tuple[Rows, list[list[Encoded] | BadRow]]]

    def within(self, recipe: Recipe, max_length: int | None) -> SelectedRows:
        """The rows used under this max_length; None is no limit."""
        sides = []
        for rows, results in self.sides:
            side = _Side(rows)
            for example, result in zip(rows.examples, results, strict=True):
                side.add(example, result, max_length, recipe.excess_length)
            sides.append(side)
        return SelectedRows(self, recipe, max_length, sides)


@dataclass
class SelectedRows:
    """The training and held-out rows under one max_length, and why the others were left out."""

    encoded: EncodedRows
    recipe: Recipe
    max_length: int | None
    sides: list[_Side]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each training sequence."""
        return self.sides[0].lengths

    @property
    def trained_tokens(self) -> int:
        """Trained tokens of the training rows."""
        return sum(one.trained for one in self.sides[0].sequences)

    @property
    def eval_rows(self) -> int:
        """Number of held-out sequences."""
        return len(self.sides[1].sequences) if len(self.sides) > 1 else 0

    def refuse(self) -> None:
        """Raise DataError with every reason why this data can't be trained on."""
        _refuse(self.sides, self.recipe, self.max_length)

    def prepared(self) -> PreparedData:
        """The trainer's datasets and their report."""
        train, held_out = self.sides[0], self.sides[1] if len(self.sides) > 1 else None
        encoder = self.encoded.encoder
        return PreparedData(
            train=train.dataset(),
            eval=held_out.dataset() if held_out else None,
            report=_report(train, encoder, self.encoded.examples.shared),
            eval_report=_report(held_out, encoder, []) if held_out else None,
            fingerprint=_fingerprint(self.sides, self.recipe, encoder, self.max_length),
            lengths=train.lengths,
            eval_lengths=held_out.lengths if held_out else [],
            examples=train.used,
            eval_examples=held_out.used if held_out else [],
        )


def encode(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, progress: Progress | None = None) -> EncodedRows:
    """Read and tokenise the recipe's dataset. `progress(done, total)` counts rows.

    Raises DataError for files that can't be read, RecipeError for conversations without a chat template.
    """
    examples = read_examples(recipe.dataset, recipe.seed)
    rows = [side for side in (examples.train, examples.eval) if side is not None]
    conversations = any(example.messages for side in rows for example in side.examples)
    encoder = Encoder(tokenizer, conversations=conversations, train_on_inputs=recipe.train_on_inputs)
    total, done = sum(len(side.examples) for side in rows), 0
    sides: list[tuple[Rows, list[list[Encoded] | BadRow]]] = []
    for part in rows:
        results: list[list[Encoded] | BadRow] = []
        for start in range(0, len(part.examples), _BATCH):
            batch = part.examples[start : start + _BATCH]
            results += encoder.encode(batch)
            done += len(batch)
            if progress is not None:
                progress(done, total)
        sides.append((part, results))
    return EncodedRows(examples, encoder, sides)


def prepare(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    progress: Progress | None = None,
    report_only: bool = False,
) -> PreparedData:
    """Read, check and tokenise the recipe's dataset. `progress(done, total)` counts rows.

    Raises DataError for files that can't be read, for bad rows unless `dataset.on_bad_rows` is skip, for rows over `max_length`
    if `excess_length` is raise, and when nothing is left to train on; RecipeError for conversations without a chat template.
    With `report_only` rows are never an error: the report has all problems, and `train` may be empty.
    """
    selected = encode(recipe, tokenizer, progress=progress).within(recipe, max_length)
    if not report_only:
        selected.refuse()
    return selected.prepared()


def _cut_away(result: list[Encoded], max_length: int) -> str:
    """Why a row can't be truncated to `max_length`: a sequence would have no trained token. Empty when it can."""
    for one in result:
        first = int(np.argmax(one.labels != NOT_TRAINED))
        if first >= max_length:
            return (
                f"no trained token is left after truncation to {max_length:,} tokens: the answer begins at token {first + 1:,}"
            )
    return ""


def _refuse(sides: list[_Side], recipe: Recipe, max_length: int | None) -> None:
    """Raise DataError with every reason why this data can't be trained on."""
    refused = [row for side in sides for row in (*side.rows.refused, *side.refused)]
    too_long = sorted((entry for side in sides for entry in side.too_long), key=lambda entry: -entry[1])
    problems, fixes = [], []
    if refused and recipe.dataset.on_bad_rows == "fail":
        problems += refusal_lines(refused, sum(side.rows.read for side in sides))
        fixes.append(
            "Correct these rows, or leave them out:  dataset.on_bad_rows=skip  (in the recipe on_bad_rows: skip, under dataset)"
        )
    if too_long and recipe.excess_length == "raise":
        problems.append(f"{len(too_long):,} row(s) are longer than max_length {max_length:,} tokens; the longest:")
        problems += [f"  {example.file}, row {example.row}: {length:,} tokens" for example, length in too_long[:5]]
        fixes.append(
            f"Raise max_length (up to {too_long[0][1]}; costs memory), or  excess_length=truncate  or  excess_length=drop"
        )
    if not problems and any(not side.sequences for side in sides):
        problems += (
            [
                "no row is left to train on",
                *(refusal_lines(refused, sum(side.rows.read for side in sides), 5) if refused else []),
            ]
            if not sides[0].sequences
            else ["no held-out row can be used"]
        )
        problems += [f"{len(too_long):,} row(s) are longer than max_length {max_length:,} tokens"] if too_long else []
        fixes.append("`finetune data RECIPE` lists the refused rows.")
    if problems:
        raise DataError(problems, "\n".join(fixes))


def _report(side: _Side, encoder: Encoder, leaked: list[Example]) -> DataReport:
    rows = side.rows
    return DataReport(
        files=rows.files,
        format=rows.format,
        rows_read=rows.read,
        rows_used=len(side.used),
        rows_refused=tuple(sorted((*rows.refused, *side.refused), key=lambda row: (row.file, row.row))),
        rows_held_out=rows.held_out,
        rows_too_long=len(side.too_long),
        rows_truncated=side.truncated,
        tokens_dropped=side.tokens_dropped,
        duplicate_rows=len(rows.duplicates),
        sequences=len(side.sequences),
        total_tokens=sum(side.lengths),
        trained_tokens=sum(one.trained for one in side.sequences),
        lengths=percentiles(side.lengths),
        unused_columns=rows.unused_columns,
        columns=rows.columns,
        findings=tuple(
            find(
                side.used,
                side.noted,
                duplicates=rows.duplicates,
                leaked=leaked,
                truncated=[example for example, _ in side.too_long] if side.truncated else [],
                writes_today=encoder.template is not None and encoder.template.writes_today,
            )
        ),
    )


def _fingerprint(sides: list[_Side], recipe: Recipe, encoder: Encoder, max_length: int | None) -> str:
    """sha256 of the rows used, the settings that change their tokens, the chat template and the tokenizer."""
    tokenizer = encoder.tokenizer
    hashed = sha256()
    settings = [max_length, recipe.excess_length, recipe.train_on_inputs, encoder.template and encoder.template.source]
    identity = [tokenizer.special_tokens_map, sorted(encoder.stops), _vocabulary(tokenizer)]
    for part in (settings, identity, *([example.content() for example in side.used] for side in sides)):
        hashed.update(json.dumps(part, sort_keys=True, default=str).encode())
    return hashed.hexdigest()


def _vocabulary(tokenizer: Any) -> Any:
    """The tokenizer's vocabulary and rules, without its current padding and truncation."""
    if not tokenizer.is_fast:
        return tokenizer.get_vocab()
    return {**json.loads(tokenizer.backend_tokenizer.to_str()), "padding": None, "truncation": None}
