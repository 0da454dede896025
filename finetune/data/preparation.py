"""From `recipe.dataset` to the trainer's datasets, with a report on every row."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.examples import held_out, sources_of
from finetune.data.findings import find
from finetune.data.formats import Example
from finetune.data.report import DataReport, Finding, Refused, percentiles, refusal_lines
from finetune.data.shards import Part, Stored, StoredExamples
from finetune.data.sources import Source
from finetune.data.token_cache import Facts, tokenised
from finetune.data.tokens import NOT_TRAINED, Encoder
from finetune.errors import DataError
from finetune.recipe import DatasetRecipe, Recipe

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

#: Called with rows done, and all rows; None where only reading tells how many there are.
Progress = Callable[[int, int | None], None]
#: Sequences that differ from the stored ones are kept in memory up to this size, and in temporary files above it.
_IN_MEMORY_BYTES = 64 * 2**20
_NO_LIMIT = np.iinfo(np.int32).max


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


@dataclass(frozen=True)
class Side:
    """One split (training or held out) before max_length applies. `mine`: which of the stored rows are of this split."""

    stored: Stored
    mine: np.ndarray
    held_out: int = 0
    split_off: bool = False  # held out from the training files

    @property
    def files(self) -> tuple[str, ...]:
        """The names of its sources."""
        return tuple(part.file for part in self.stored.parts)

    @property
    def read(self) -> int:
        """Rows read for this split."""
        return int(self.mine.sum()) if self.split_off else sum(part.read for part in self.stored.parts)

    @property
    def unread(self) -> list[Refused]:
        """Rows that can't be read."""
        return [] if self.split_off else [row for part in self.stored.parts for row in part.refused]


class LimitedSide:
    """One split under a max_length: its rows as masks, and its sequences.

    `weighted`: rows are used as often as `dataset.weights` says, those for a fraction of it chosen by `seed`.
    """

    def __init__(self, side: Side, max_length: int | None, excess: str, *, weighted: bool = False, seed: int = 0) -> None:
        self.side, self.max_length = side, max_length
        self._limit = _NO_LIMIT if max_length is None else max_length
        stored = self.stored = side.stored
        bad = side.mine & (stored.count == 0)
        long = side.mine & (stored.longest > self._limit)
        nothing = np.zeros(len(stored), dtype=bool)
        cut_away = long & self._begins_after_the_limit() if excess == "truncate" and long.any() else nothing
        is_text = ~(stored.has("conversation") | stored.has("pair"))
        self.chunked = long & is_text if excess == "chunk" else nothing
        self.too_long = long & ~cut_away & ~self.chunked
        self.truncated = self.too_long if excess == "truncate" else nothing
        usable = side.mine & ~bad & ~cut_away & (~self.too_long | self.truncated)
        self.passes = _passes(stored, usable, seed) if weighted else [usable]
        self.used = self.passes[0]
        self.left_out = int((usable & ~self.used).sum())
        refused = [stored.refusal(index) for index in np.flatnonzero(bad).tolist()]
        self.refused = [*side.unread, *refused, *(self._cut_away(index) for index in np.flatnonzero(cut_away).tolist())]
        over = stored.length[np.repeat(self.too_long, stored.count)].astype(np.int64)
        self.tokens_dropped = int(np.maximum(over - (self._limit if excess == "truncate" else 0), 0).sum())
        self.sequences = [np.repeat(rows, stored.count) for rows in self.passes]
        self._in_chunks = np.repeat(self.chunked, stored.count) & (stored.length > self._limit)
        self.lengths = np.concatenate([self._lengths_of(which) for which in self.sequences])

    def _lengths_of(self, which: np.ndarray) -> np.ndarray:
        """Tokens of each sequence that the stored ones `which` become."""
        length, chunked = self.stored.length[which], self._in_chunks[which]
        return _chunk_lengths(length, self._limit) if chunked.any() else np.minimum(length, self._limit)

    @cached_property
    def trained_tokens(self) -> int:
        """Trained tokens of the rows used."""
        count = 0
        for which in self.sequences:
            cut = which & (self.stored.length > self._limit) & ~self._in_chunks
            count += int(self.stored.trained[which & ~cut].sum(dtype=np.int64))
            count -= len(self._lengths_of(which)) - int(which.sum())  # the first token of a sequence is not trained
            for table, keep, _ in self.stored.pieces(cut) if cut.any() else ():
                for labels in table["labels"].filter(keep):
                    count += int((labels.values.to_numpy()[: self._limit] != NOT_TRAINED).sum())
        return count

    def examples(self) -> StoredExamples:
        """The source rows used."""
        return StoredExamples(self.stored, np.flatnonzero(self.used))

    def longest(self, most: int) -> list[tuple[tuple[str, int], int]]:
        """Places and tokens of the longest rows over max_length."""
        rows = np.flatnonzero(self.too_long)
        order = rows[np.argsort(-self.stored.longest[rows], kind="stable")][:most]
        return [(self.stored.place(index), int(self.stored.longest[index])) for index in order]

    def dataset(self, fingerprint: str) -> Dataset:
        """The sequences as a dataset. Those of shards that are used whole stay in their files."""
        import pyarrow as pa
        from datasets import Dataset
        from datasets.table import InMemoryTable

        schema = pa.schema([(name, pa.list_(pa.int32())) for name in ("input_ids", "labels")])
        table = pa.concat_tables([schema.empty_table(), *self._pieces(schema)])
        return Dataset(InMemoryTable(table), fingerprint=fingerprint)

    def _pieces(self, schema: pa.Schema) -> Iterator[pa.Table]:
        made: list[pa.Table] = []
        for table, keep, numbers in (piece for which in self.sequences for piece in self.stored.pieces(which)):
            over = bool((keep & (self.stored.length[numbers] > self._limit)).any())
            as_stored = bool(keep.all()) and not over
            if not as_stored:
                kept = table.filter(keep)
                if over and self._in_chunks.any():
                    kept = _in_chunks(kept, _chunk_lengths(self.stored.length[numbers][keep], self._limit))
                made.append((_shortened(kept, self._limit) if over else kept).cast(schema))
            if as_stored or sum(one.nbytes for one in made) > _IN_MEMORY_BYTES:
                yield from _in_file(made) if sum(one.nbytes for one in made) > _IN_MEMORY_BYTES else made
                made = []
            if as_stored:
                yield table.cast(schema)
        yield from made

    def _begins_after_the_limit(self) -> np.ndarray:
        """Whether a sequence of each row would have no trained token after truncation."""
        with_tokens = np.flatnonzero(self.stored.count)
        found = np.zeros(len(self.stored), dtype=bool)
        begins = (self.stored.first >= self._limit).astype(np.int64)
        found[with_tokens] = np.add.reduceat(begins, self.stored.sequence_starts[with_tokens]) > 0
        return found

    def _cut_away(self, index: int) -> Refused:
        starts = self.stored.sequence_starts
        first = self.stored.first[starts[index] : starts[index + 1]]
        place = int(first[first >= self._limit][0])
        reason = (
            f"no trained token is left after truncation to {self._limit:,} tokens: the answer begins at token {place + 1:,}"
        )
        return Refused(*self.stored.place(index), None, reason)


def _passes(stored: Stored, usable: np.ndarray, seed: int) -> list[np.ndarray]:
    """The rows of each pass over the data in an epoch: those of weight 2.5 are in two, and half of them in a third."""
    weights, sources = stored.weights, stored.source
    passes = []
    for number in range(max(1, math.ceil(weights.max(initial=1.0)))):
        rows = usable & (weights >= number + 1)
        for source in np.unique(sources[usable & (weights > number) & (weights < number + 1)]):
            mine = np.flatnonzero(usable & (sources == source))
            wanted = round((stored.parts[source].weight - number) * len(mine))
            rows[np.random.default_rng([seed, int(source)]).permutation(mine)[:wanted]] = True
        passes.append(rows)
    return passes


def _chunk_lengths(length: np.ndarray, limit: int) -> np.ndarray:
    """Lengths of the pieces, as equal as can be and none over the limit, of sequences of these lengths."""
    count = -(-length // limit)
    place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(length // count, count) + (place < np.repeat(length % count, count))


def _in_chunks(table: pa.Table, lengths: np.ndarray) -> pa.Table:
    """The same tokens as sequences of these lengths; the first of each is not trained."""
    import pyarrow as pa

    ends = np.cumsum(lengths)
    offsets = pa.array(np.append(0, ends), pa.int32())
    values = {name: table[name].combine_chunks().flatten() for name in table.column_names}
    labels = values["labels"].to_numpy(zero_copy_only=False).copy()
    labels[ends - lengths] = NOT_TRAINED
    values["labels"] = pa.array(labels)
    return pa.table({name: pa.ListArray.from_arrays(offsets, column) for name, column in values.items()})


def _shortened(table: pa.Table, limit: int) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pa.table({
        name: pc.list_slice(table[name], 0, limit, return_fixed_size_list=False) for name in table.column_names
    })  # fmt: skip


def _in_file(tables: list[pa.Table]) -> list[pa.Table]:
    """The tables in a temporary file, which is gone when nothing uses it any more."""
    import pyarrow as pa

    with tempfile.NamedTemporaryFile(suffix=".arrow", delete=False) as file, pa.ipc.new_file(file, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    with pa.memory_map(file.name) as opened:
        mapped = pa.ipc.open_file(opened).read_all()
    with suppress(PermissionError):  # Windows keeps what is mapped
        Path(file.name).unlink()
    return [mapped]


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
