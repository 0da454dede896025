"""From `recipe.dataset` to the trainer's datasets, with a report on every row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.examples import held_out, sources_of
from finetune.data.findings import find
from finetune.data.formats import Example
from finetune.data.report import DataReport, Finding, percentiles, refusal_lines
from finetune.data.shards import Part, Stored
from finetune.data.sources import Source
from finetune.data.splits import LimitedSide, Side
from finetune.data.token_cache import Facts, tokenised
from finetune.data.tokens import Encoder
from finetune.errors import DataError
from finetune.recipe import DatasetRecipe, Recipe

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

#: Called with rows done, and all rows; None where only reading tells how many there are.
Progress = Callable[[int, int | None], None]


@dataclass
class PreparedData:
    """The trainer's datasets and their report.

    `train` and `eval` have columns input_ids and labels (-100 where not trained on), one sequence per row, none longer than
    max_length. `lengths` are tokens per training sequence, in order. `examples` and `eval_examples` are the source rows; exact
    match prompts with an Example's `question()` and expects its `reference()`. `plain`: every training row is a prompt and its
    completion without a template.
    """

    train: Dataset
    eval: Dataset | None
    report: DataReport
    eval_report: DataReport | None
    fingerprint: str
    lengths: list[int]
    eval_lengths: list[int]
    examples: Sequence[Example]
    eval_examples: Sequence[Example]
    plain: bool


@dataclass
class EncodedRows:
    """Every row of a recipe's dataset as tokens, or why it has none, before max_length applies. Expensive to make; `within` is
    cheap."""

    encoder: Encoder
    sides: list[Side]

    @cached_property
    def leaked(self) -> tuple[int, list[tuple[str, int]]]:
        """Held-out rows whose prompt (plain text: the text) is also in the training rows: how many, and the first places."""
        if len(self.sides) < 2:
            return 0, []
        train, held = self.sides
        rows = np.flatnonzero(held.mine & np.isin(held.stored.asked, train.stored.asked[train.mine]))
        return len(rows), [held.stored.place(index) for index in rows[:4]]

    def within(self, recipe: Recipe, max_length: int | None) -> SelectedRows:
        """The rows used under this max_length; None is no limit."""
        weighted = bool(recipe.dataset.weights)
        sides = [
            LimitedSide(side, max_length, recipe.excess_length, weighted=weighted and number == 0, seed=recipe.seed)
            for number, side in enumerate(self.sides)
        ]
        return SelectedRows(self, recipe, max_length, sides)


@dataclass
class SelectedRows:
    """The training and held-out rows under one max_length, and why the others were left out."""

    encoded: EncodedRows
    recipe: Recipe
    max_length: int | None
    sides: list[LimitedSide]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each training sequence."""
        return self.sides[0].lengths

    @property
    def trained_tokens(self) -> int:
        """Trained tokens of the training rows."""
        return self.sides[0].trained_tokens

    @property
    def eval_rows(self) -> int:
        """Number of held-out sequences."""
        return len(self.sides[1].lengths) if len(self.sides) > 1 else 0

    @cached_property
    def findings(self) -> list[tuple[Finding, ...]]:
        """What is worth knowing about each side's rows; that held-out rows are known is with the training rows."""
        return [
            tuple(
                find(
                    one.stored,
                    one.used,
                    duplicates=one.stored.repeated(one.side.mine),
                    leaked=self.encoded.leaked if number == 0 else (0, []),
                    held_out=int(self.sides[-1].side.mine.sum()),
                    truncated=one.truncated,
                    encoder=self.encoded.encoder,
                )
            )
            for number, one in enumerate(self.sides)
        ]

    def refuse(self) -> None:
        """Raise DataError with every reason why this data can't be trained on."""
        _refuse(self.sides, self.recipe, self.max_length)
        blocking = [one for one in self.findings[0] if one.blocks and one.kind not in self.recipe.dataset.accept_findings]
        if blocking:
            kinds = ", ".join(one.kind for one in blocking)
            raise DataError([str(one) for one in blocking], f"To train on it as it is:  dataset.accept_findings=[{kinds}]")

    def prepared(self) -> PreparedData:
        """The trainer's datasets and their report."""
        train, held = self.sides[0], self.sides[1] if len(self.sides) > 1 else None
        encoder = self.encoded.encoder
        fingerprint = _fingerprint(self.sides, self.recipe, encoder, self.max_length)
        return PreparedData(
            train=train.dataset(f"{fingerprint}-train"),
            eval=held.dataset(f"{fingerprint}-eval") if held else None,
            report=_report(train, self.findings[0]),
            eval_report=_report(held, self.findings[1]) if held else None,
            fingerprint=fingerprint,
            lengths=train.lengths.tolist(),
            eval_lengths=held.lengths.tolist() if held else [],
            examples=train.examples(),
            eval_examples=held.examples() if held else [],
            plain=bool(train.stored.has("pair")[train.used].all()),
        )


def facts_of(dataset: DatasetRecipe) -> dict[Source, Facts]:
    """What is known of the dataset's files before they are read: their content's hash. Raises DataError and RecipeError."""
    return {source: Facts.of(source) for sources in sources_of(dataset) for source in sources}


def encode(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, facts: dict[Source, Facts] | None = None,
    progress: Progress | None = None,
) -> EncodedRows:  # fmt: skip
    """Read and tokenise the recipe's dataset, or find its tokens in the cache. `progress(done, total)` counts rows;
    the total is None where only reading tells it. `facts`: those of its files, where they are known already.

    Raises DataError for files that can't be read, RecipeError for conversations without a chat template.
    """
    dataset = recipe.dataset
    sources, eval_sources = sources_of(dataset)
    encoder = Encoder(tokenizer, train_on_inputs=recipe.train_on_inputs)
    facts = facts_of(dataset) if facts is None else facts
    counted = _Counted(progress, facts.values(), dataset.max_rows)
    train = _stored(sources, facts, dataset, dataset.max_rows, encoder, counted)
    held = _stored(eval_sources, facts, dataset, None, encoder, counted)
    counted.finish()
    if any(stored.has("conversation").any() for stored in (train, held)):
        encoder.use_template()
    every = np.ones(len(train), dtype=bool)
    if eval_sources:
        return EncodedRows(encoder, [Side(train, every), Side(held, np.ones(len(held), dtype=bool))])
    if not dataset.test_split_size:
        return EncodedRows(encoder, [Side(train, every)])
    out = np.array(held_out(train.asked.tolist(), dataset.test_split_size, recipe.seed), dtype=bool)
    return EncodedRows(encoder, [Side(train, ~out, held_out=int(out.sum())), Side(train, out, split_off=True)])


def _stored(
    sources: list[Source], facts: dict[Source, Facts], dataset: DatasetRecipe, limit: int | None, encoder: Encoder,
    counted: _Counted,
) -> Stored:  # fmt: skip
    """The rows of all sources, each in its own format unless the recipe names one. At most `limit` rows are read."""
    parts: list[Part] = []
    for source in sources:
        left = None if limit is None else limit - sum(part.read for part in parts)
        if left == 0:
            break
        parts.append(tokenised(source, facts[source], dataset, left, encoder, counted.of_next_source()))
        counted.add(parts[-1].read)
    return Stored(parts)


class _Counted:
    """Rows done of all sources, and all rows, where their files have lines."""

    def __init__(self, progress: Progress | None, facts: Iterable[Facts], limit: int | None) -> None:
        lines = [one.lines for one in facts]
        self._total = None if limit is not None or None in lines else sum(filter(None, lines))
        self._progress, self._before, self._told = progress, 0, -1

    def of_next_source(self) -> Callable[[int], None]:
        """Counts the rows of one more source."""
        before = self._before
        return lambda done: self._tell(before + done, self._total)

    def add(self, read: int) -> None:
        """One source is done."""
        self._before += read

    def finish(self) -> None:
        """All are done."""
        self._tell(self._before, self._before)

    def _tell(self, done: int, total: int | None) -> None:
        if self._progress is not None and done != self._told:
            self._told = done
            self._progress(done, total)


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


def _refuse(sides: list[LimitedSide], recipe: Recipe, max_length: int | None) -> None:
    """Raise DataError with every reason why this data can't be trained on."""
    refused = [row for side in sides for row in side.refused]
    read = sum(side.side.read for side in sides if not side.side.split_off)
    too_long = sum(int(side.too_long.sum()) for side in sides)
    problems, fixes = [], []
    if refused and recipe.dataset.on_bad_rows == "fail":
        problems += refusal_lines(refused, read)
        fixes.append(
            "Correct these rows, or leave them out:  dataset.on_bad_rows=skip  (in the recipe on_bad_rows: skip, under dataset)"
        )
    if too_long and recipe.excess_length in ("raise", "chunk"):
        longest = sorted((entry for side in sides for entry in side.longest(5)), key=lambda entry: -entry[1])
        problems.append(f"{too_long:,} row(s) are longer than max_length {max_length:,} tokens; the longest:")
        problems += [f"  {file}, row {row}: {length:,} tokens" for (file, row), length in longest[:5]]
        fixes.append(
            f"Raise max_length (up to {longest[0][1]}; costs memory), or  excess_length=truncate  or  excess_length=drop"
            + ("\nOnly rows of plain text are cut into chunks." if recipe.excess_length == "chunk" else "")
        )
    if not problems and any(not len(side.lengths) for side in sides):
        problems += (
            [
                "no row is left to train on",
                *(refusal_lines(refused, read, 5) if refused else []),
            ]
            if not len(sides[0].lengths)
            else ["no held-out row can be used"]
        )
        problems += [f"{too_long:,} row(s) are longer than max_length {max_length:,} tokens"] if too_long else []
        fixes.append("`finetune data RECIPE` lists the refused rows.")
    if problems:
        raise DataError(problems, "\n".join(fixes))


def _report(limited: LimitedSide, findings: tuple[Finding, ...]) -> DataReport:
    side = limited.side
    parts = limited.stored.parts
    return DataReport(
        files=side.files,
        format=", ".join(dict.fromkeys(part.format for part in parts)),
        rows_read=side.read,
        rows_used=int(limited.used.sum()),
        rows_refused=tuple(sorted(limited.refused, key=lambda row: (row.file, row.row))),
        rows_held_out=side.held_out,
        rows_too_long=int(limited.too_long.sum()),
        rows_truncated=int(limited.truncated.sum()),
        rows_chunked=int((limited.chunked & limited.used).sum()),
        rows_left_out=limited.left_out,
        rows_repeated=int(sum(rows.sum() for rows in limited.passes[1:])),
        tokens_dropped=limited.tokens_dropped,
        duplicate_rows=sum(one.rows for one in findings if one.kind == "duplicates"),
        sequences=len(limited.lengths),
        total_tokens=int(limited.lengths.sum(dtype=np.int64)),
        trained_tokens=limited.trained_tokens,
        lengths=percentiles(limited.lengths),
        unused_columns=() if side.split_off else tuple(dict.fromkeys(one for part in parts for one in part.unused_columns)),
        columns={} if side.split_off else {name: column for part in parts for name, column in part.columns.items()},
        findings=findings,
    )


def _fingerprint(sides: list[LimitedSide], recipe: Recipe, encoder: Encoder, max_length: int | None) -> str:
    """sha256 of the rows used, the settings that change their tokens, the chat template and the tokenizer."""
    template = encoder.template and encoder.template.source
    settings: list[Any] = [max_length, recipe.excess_length, recipe.train_on_inputs, template]
    if recipe.dataset.weights:
        settings += [recipe.dataset.weights, recipe.seed]
    identity = [encoder.tokenizer.special_tokens_map, sorted(encoder.stops), encoder.vocabulary]
    hashed = sha256(json.dumps([settings, identity], sort_keys=True, default=str).encode())
    for side in sides:
        hashed.update(b"side" + side.stored.content[side.used].tobytes())
    return hashed.hexdigest()
