"""Apply max_length to one split of the data, report on its rows with the problems found, and pack rows into sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from finetune.data.conversation import Example
from finetune.data.report import DataReport, Finding, Refused, format_locations
from finetune.data.shards import StoredRows, summarise_pictures
from finetune.errors import DataError, FinetuneError
from finetune.settings.compatibility import Sizes
from finetune.settings.methods import NOT_TRAINED

if TYPE_CHECKING:
    from datasets import Dataset

    from finetune.data.pictures.processing import PictureProcessor

_NO_LIMIT = np.iinfo(np.int32).max
_TRUNCATED_SHARE = 0.01  # share of truncated rows from which on they are reported
_MIN_ROWS = 20  # fewest rows for a finding about most rows
_MAX_COMPARED_PAIRS = 20_000  # most pairs that are compared to find contradictions
#: Note on a tokenised row -> its description and fix.
_NOTES = {
    "unrolled": ("the chat template rewrites earlier answers, so each answer is its own sequence, in {rows}", ""),
    "unprompted": (
        "the generation prompt adds text, such as <think>, that the training text lacks, in {rows}",
        "Write the reasoning before the answers, or use a chat_template without it.",
    ),
    "altered": ("the chat template leaves out or changes text, in {rows}", "Look at the example: finetune data RECIPE"),
    "trimmed": (
        "the chat template strips spaces around answers, so the model does not learn these spaces, in {rows}",
        "This matters for code completion: use a model whose template keeps answers unchanged.",
    ),
    "unthinking": (
        "the model can reason before it answers, but the answers have no reasoning, so it learns to skip it, in {rows}",
        "To keep the reasoning, add reasoning_content to the answers.",
    ),
    "endless": (
        "the chat template has no EOS after assistant turns; only the last answer teaches the model to stop, in {rows}",
        "Set chat_template to one that ends each answer with the EOS token.",
    ),
    "ended": ("the chat template writes no token after the last answer, so the EOS token is added, in {rows}", ""),
    "literal": (
        "user texts contain special tokens of the model, which are tokenised as plain text, in {rows}",
        "Remove them if they are left over from a chat template.",
    ),
    "control": (
        "answers, system prompts or plain texts contain special tokens of the model, which stay special tokens, in {rows}",
        "Remove those that the chat template writes itself, such as the EOS token.",
    ),
    "media": (
        "<image>, <video> or <audio> is trained on as text, and no column has such files, in {rows}",
        "Leave those rows out if they ask about a file.",
    ),
    "unknown": (
        "characters that the tokenizer does not know become its unknown token, in {rows}",
        "Choose a model whose tokenizer knows them.",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class DataSplit:
    """The training or held-out split before max_length applies."""

    stored: StoredRows
    row_mask: np.ndarray  # which stored rows belong to the split
    split_off: bool = False  # taken from the training files by test_split_size

    @property
    def unused_columns(self) -> tuple[str, ...]:
        # the training split reports the columns of the shared files
        columns = (name for source in self.stored.sources for name in source.unused_columns)
        return () if self.split_off else tuple(dict.fromkeys(columns))

    @property
    def rows_read(self) -> int:
        return int(self.row_mask.sum()) if self.split_off else sum(source.rows_read for source in self.stored.sources)


class LimitedSplit:
    """One split under a max_length: its rows as masks, and its sequences."""

    def __init__(self, unlimited: DataSplit, max_length: int | None, excess_length: str) -> None:
        self.unlimited = unlimited
        self._limit = _NO_LIMIT if max_length is None else max_length
        stored = self.stored = unlimited.stored
        # row masks
        without_sequences = unlimited.row_mask & (stored.sequence_counts == 0)
        over_limit = unlimited.row_mask & (stored.longest > self._limit)
        truncates, in_chunks = excess_length == "truncate", excess_length == "chunk"
        self._equal_when_cut = self._pairs_equal_when_cut(over_limit & (truncates and stored.are_pairs))
        starts_after_limit = stored.by_row(np.logical_or, stored.first_trained >= self._limit)
        answer_cut_off = (over_limit & starts_after_limit & truncates) | self._equal_when_cut
        self.chunked = over_limit & ~(stored.has("conversation") | stored.has("pair")) & in_chunks
        self.too_long = over_limit & ~answer_cut_off & ~self.chunked
        self.truncated = self.too_long & truncates
        self.used = unlimited.row_mask & ~without_sequences & ~answer_cut_off & (~self.too_long | self.truncated)
        self.refused = [] if unlimited.split_off else [row for source in stored.sources for row in source.refused]
        self.refused += map(stored.refusal, np.flatnonzero(without_sequences).tolist())
        self.refused += map(self._cut_refusal, np.flatnonzero(answer_cut_off).tolist())
        self.sequence_mask = np.repeat(self.used, stored.sequence_counts)
        self._is_cut = stored.lengths > self._limit
        self._ends = stored.lengths if in_chunks else np.minimum(stored.lengths, self._limit)  # of each sequence
        self._chunk_counts = -(-self._ends // self._limit)
        self._sequence_lengths = _chunk_lengths(self._ends[self.sequence_mask], self._chunk_counts[self.sequence_mask])

    @cached_property
    def lengths(self) -> np.ndarray:
        """Return the tokens of each training row; of a pair, with the longer answer."""
        lengths = self._sequence_lengths
        return lengths.reshape(-1, 2).max(axis=1) if self.stored.are_pairs else lengths

    def longest_mismatched(self) -> int:
        """Return the tokens of the longest prompt plus the longest answer, which KTO may combine."""
        prompt_lengths = self.stored.first_trained[self.sequence_mask]  # a prompt is all before the first trained token
        answer_lengths = self.stored.lengths[self.sequence_mask] - prompt_lengths
        return int(prompt_lengths.max(initial=0) + answer_lengths.max(initial=0))

    def largest_pictures(self, processor: PictureProcessor) -> Sizes:
        """Return the image sizes of the row with the most pixel values."""
        stored_sizes = self.stored.picture_sizes
        sizes = stored_sizes[self.used[stored_sizes[:, 0]]]
        value_counts = processor.values_by_row(sizes, len(self.stored))
        if not value_counts.any():
            return ()
        largest_row_sizes = sizes[sizes[:, 0] == value_counts.argmax(), 1:].tolist()
        return tuple(processor.size(width, height) for width, height in largest_row_sizes)

    @property
    def total_tokens(self) -> int:
        return int(self._sequence_lengths.sum(dtype=np.int64))

    @property
    def trained_tokens(self) -> int:
        return int(self._trained_sequence_lengths.sum(dtype=np.int64))

    @cached_property
    def trained_lengths(self) -> np.ndarray:
        """Return the trained tokens of each row; of a pair, the mean."""
        lengths = self._trained_sequence_lengths
        return -(-lengths.reshape(-1, 2).sum(axis=1) // 2) if self.stored.are_pairs else lengths  # rounded up

    @cached_property
    def _trained_sequence_lengths(self) -> np.ndarray:
        if not self._is_cut[self.sequence_mask].any():
            return self.stored.trained_counts[self.sequence_mask].astype(np.int64)
        labels = self._cut(self.sequence_mask)["labels"].combine_chunks()
        return np.add.reduceat(labels.flatten().to_numpy() != NOT_TRAINED, labels.offsets.to_numpy()[:-1], dtype=np.int64)

    @property
    def examples(self) -> list[Example]:
        return [self.stored.example(int(row)) for row in np.flatnonzero(self.used)]

    def longest_rows(self) -> list[tuple[tuple[str, int], int]]:
        """Return ((file, row), tokens) of the five longest rows over max_length."""
        rows = np.flatnonzero(self.too_long)
        ordered = rows[np.argsort(-self.stored.longest[rows], kind="stable")][:5]
        return [(self.stored.row_location(index), int(self.stored.longest[index])) for index in ordered]

    def report(self, findings: tuple[Finding, ...]) -> DataReport:
        """Return the report of this split, with its findings."""
        unlimited, parts, lengths = self.unlimited, self.stored.sources, self.lengths
        # inverted_cdf: a length that a row has
        percentiles = np.percentile(lengths, (50, 95, 99, 100), method="inverted_cdf") if len(lengths) else ()
        return DataReport(
            files=tuple(part.file for part in parts),
            format=", ".join(dict.fromkeys(part.format for part in parts)),
            rows_read=unlimited.rows_read,
            rows_used=int(self.used.sum()),
            rows_refused=tuple(sorted(self.refused, key=lambda row: (row.file, row.row))),
            rows_held_out=0 if unlimited.split_off else int((~unlimited.row_mask).sum()),
            rows_too_long=int(self.too_long.sum()),
            rows_truncated=int(self.truncated.sum()),
            rows_chunked=int((self.chunked & self.used).sum()),
            sequences=len(lengths),
            total_tokens=self.total_tokens,
            trained_tokens=self.trained_tokens,
            lengths=dict(zip(("p50", "p95", "p99", "max"), map(int, percentiles), strict=False)),
            unused_columns=unlimited.unused_columns,
            columns={} if unlimited.split_off else {name: column for part in parts for name, column in part.columns.items()},
            findings=findings,
            pictures=summarise_pictures(self.stored.picture_sizes, self.used),
        )

    def dataset(self, fingerprint: str) -> Dataset:
        from datasets import Dataset
        from datasets.table import InMemoryTable

        return Dataset(InMemoryTable(self.table()), fingerprint=fingerprint)

    def table(self, first_rows: int | None = None) -> pa.Table:
        """Return input_ids and labels of all rows, or of at least the first ones, with rejected_ columns for pairs."""
        mask = self.sequence_mask
        if first_rows is not None:
            mask = mask & (np.cumsum(mask) <= first_rows * (2 if self.stored.are_pairs else 1))
        if self._is_cut[mask].any():
            table = self._cut(mask)
        else:  # stored rows stay mapped from their file; a selection takes 8 bytes of memory a token
            table = self.stored.sequences if mask.all() else self.stored.sequences.filter(mask)
        if not self.stored.are_pairs:
            return table
        # a pair's chosen sequence is followed by its rejected one
        chosen, rejected = (table.take(pa.array(range(first, table.num_rows, 2), pa.int64())) for first in (0, 1))
        names = [*table.column_names, *(f"rejected_{name}" for name in table.column_names)]
        return pa.table([*chosen.columns, *rejected.columns], names=names)

    def _cut(self, mask: np.ndarray) -> pa.Table:
        selected = self.stored.sequences.filter(mask)
        ends, chunk_counts = self._ends[mask], self._chunk_counts[mask]
        offsets = np.append(0, np.cumsum(_chunk_lengths(ends, chunk_counts)))
        if offsets[-1] > np.iinfo(np.int32).max:
            problem = f"the rows have {offsets[-1]:,} tokens; at most {np.iinfo(np.int32).max:,} can be cut"
            raise DataError(problem, "Set dataset.max_rows, or choose  excess_length=drop")
        # when truncating, the longest end is max_length; chunks have all tokens
        sliced = (pc.list_slice(selected[name], 0, int(ends.max())) for name in ("input_ids", "labels"))
        ids, labels = (pc.list_flatten(array).to_numpy().copy() for array in sliced)
        labels[offsets[:-1]] = NOT_TRAINED  # nothing predicts the first token of a chunk
        tokens = [pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(array)) for array in (ids, labels)]
        rows = pa.array(np.repeat(np.arange(len(ends)), chunk_counts))
        others = [selected[name].take(rows) for name in selected.column_names[2:]]
        return pa.table([*tokens, *others], names=selected.column_names)

    def _pairs_equal_when_cut(self, over_limit: np.ndarray) -> np.ndarray:
        rows = np.flatnonzero(over_limit & (self.stored.sequence_counts == 2))
        ids = pc.list_flatten(self.stored.table["input_ids"])
        pairs = ((ids[start].values, ids[start + 1].values) for start in self.stored.sequence_starts[rows].tolist())
        mask = np.zeros(len(self.stored), dtype=bool)
        mask[rows] = [chosen[: self._limit].equals(rejected[: self._limit]) for chosen, rejected in pairs]
        return mask

    def _cut_refusal(self, index: int) -> Refused:
        if self._equal_when_cut[index]:
            reason = f"and rejected are cut to the same {self._limit:,} tokens; there is nothing to prefer"
            return Refused(*self.stored.row_location(index), "chosen", reason)
        bounds = self.stored.sequence_starts
        starts = self.stored.first_trained[bounds[index] : bounds[index + 1]]
        answer_start = int(starts[starts >= self._limit][0])
        reason = f"no trained token is left after truncation; max_length is {self._limit:,}"
        return Refused(*self.stored.row_location(index), None, f"{reason}: the answer begins at token {answer_start + 1:,}")


def _chunk_lengths(lengths: np.ndarray, counts: np.ndarray) -> np.ndarray:
    # chunks are as equal as possible: the first ones of a sequence have one more token
    chunk_index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(lengths // counts, counts) + (chunk_index < np.repeat(lengths % counts, counts))


def find_leaks(train: DataSplit, held_out: DataSplit) -> Iterator[Finding]:
    """Yield a finding of held-out rows whose prompt is also trained on."""
    trained_prompts = train.stored.prompt_digests[train.row_mask]  # for plain text the digest covers the whole text
    leaked = held_out.row_mask & np.isin(held_out.stored.prompt_digests, trained_prompts)
    if leaked.any():
        text = "{rows} held out have the prompt of a training row, so their scores say little"
        fix = "Remove them from one of the files, or hold rows out with dataset.test_split_size."
        # a finding blocks a run whose evaluation or training would be worth next to nothing
        blocks = bool(leaked.sum() == held_out.row_mask.sum() >= _MIN_ROWS)
        yield _finding(held_out.stored, "leak", text, leaked, fix, blocks=blocks)


def find_problems(split: LimitedSplit) -> Iterator[Finding]:
    """Yield the findings of one split."""
    stored, used, truncated = split.stored, split.used, split.truncated
    finding = partial(_finding, stored)
    rows = np.flatnonzero(split.unlimited.row_mask)
    # 8 of the 16 bytes fit an integer
    digests = np.ascontiguousarray(stored.content_digests[:, :8]).view(np.uint64).ravel()[rows]
    if len(duplicates := np.delete(rows, np.unique(digests, return_index=True)[1])):
        text = "{rows} are duplicates; they are kept, so they count more than once"
        yield finding("duplicates", text, duplicates, "Remove them unless that is intended.")
    if truncated.sum() > _TRUNCATED_SHARE * used.sum():
        text = f"{{rows}} of {used.sum():,} are cut at max_length, so the model never sees their end"
        with_answer = used & (stored.has("conversation") | stored.has("pair"))
        cuts_all_answers = bool(with_answer.sum() >= _MIN_ROWS) and not (with_answer & ~truncated).any()
        fix = "Raise max_length, or leave them out: excess_length=drop"
        yield finding("truncated", text, truncated, fix, blocks=cuts_all_answers)
    if (rows := used & stored.has("replaced")).any():
        text = "{rows} have U+FFFD, the mark for characters lost in decoding"
        fix = "Regenerate the file with the right encoding."
        yield finding("replaced", text, rows, fix, blocks=bool(2 * rows.sum() > used.sum() >= _MIN_ROWS))
    if stored.are_pairs:
        yield from _pair_findings(stored, used)
    if stored.are_labelled:
        yield from _label_findings(stored, used)
    is_unrolled = stored.sequence_counts > (2 if stored.are_pairs else 1)
    for note, (text, fix) in _NOTES.items():
        rows = used & (is_unrolled if note == "unrolled" else stored.has(note))
        if rows.any():
            yield finding(note, text, rows, fix)


def _pair_findings(stored: StoredRows, used: np.ndarray) -> Iterator[Finding]:
    pairs = np.flatnonzero(used & (stored.sequence_counts == 2))
    # another pair has the same prompt, and the same answers in the other order
    _, prompts, counts = np.unique(stored.prompt_digests[pairs], return_inverse=True, return_counts=True)
    compared = pairs[counts[prompts] > 1][:_MAX_COMPARED_PAIRS]
    preferences = []
    for row in compared:
        chosen, rejected = stored.example(int(row)).pair()
        preferences.append((int(stored.prompt_digests[row]), chosen.reference(), rejected.reference()))
    all_preferences = set(preferences)
    is_contradicted = [(prompt, rejected, chosen) in all_preferences for prompt, chosen, rejected in preferences]
    contradicting = compared[np.array(is_contradicted, dtype=bool)]
    if len(contradicting):
        text = "{rows} contradict another row: it rejects the answer that they prefer"
        fix = "Of each two contradicting rows, keep the correct one."
        yield _finding(stored, "contradictions", text, contradicting, fix, blocks=2 * len(contradicting) > len(pairs))


def _label_findings(stored: StoredRows, used: np.ndarray) -> Iterator[Finding]:
    good = used & ~stored.has("undesirable")
    if not good.any() or good.sum() == used.sum():
        text = f"{{rows}} are all marked {'good' if good.any() else 'bad'}, so there is nothing to compare them with"
        fix = "Add answers of the other kind, or train on good answers alone with  method=sft"
        yield _finding(stored, "one label", text, used, fix, blocks=bool(used.any()))
        return
    rows = np.flatnonzero(used)
    answers = list(zip(stored.prompt_digests[rows].tolist(), stored.table["answer"].to_numpy()[rows].tolist(), strict=True))
    labels = set(zip(answers, good[rows].tolist(), strict=True))
    is_both = [(answer, True) in labels and (answer, False) in labels for answer in answers]
    contradicting = rows[np.array(is_both, dtype=bool)]
    if len(contradicting):
        text = "{rows} have an answer marked both good and bad"
        yield _finding(stored, "contradictions", text, contradicting, "Keep one.", blocks=2 * len(contradicting) > len(rows))


def _finding(stored: StoredRows, kind: str, text: str, rows: np.ndarray, fix: str, *, blocks: bool = False) -> Finding:
    # `rows` is a mask or indices; a fourth location shows that there are more than three
    indices = np.flatnonzero(rows) if rows.dtype == bool else rows
    first = format_locations([stored.row_location(index) for index in indices[:4]])
    return Finding(kind, text, len(indices), (first,), fix, blocks)


def pack(dataset: Dataset, max_length: int, seed: int) -> Dataset:
    """Pack rows best-fit into sequences of at most `max_length` tokens. Raise DataError or FinetuneError."""
    from trl import pack_dataset

    before = _lengths(dataset)
    if (longest := before.max(initial=0)) > max_length:  # TRL would truncate the row silently
        raise DataError(
            f"a row has {longest:,} tokens, more than a packed sequence (max_length {max_length:,})",
            "Raise max_length, or choose  excess_length=drop  or  excess_length=truncate",
        )
    # TRL packs a thousand rows at a time, so they are shuffled first
    packed = pack_dataset(dataset.select_columns(["input_ids", "labels"]).shuffle(seed=seed), max_length, "bfd")
    after = _lengths(packed)
    if after.sum() != before.sum() or after.max(initial=0) > max_length:
        counts = f"{before.sum():,} tokens before, {after.sum():,} after; longest {after.max(initial=0):,} of {max_length:,}"
        raise FinetuneError(f"packing changed the data: {counts}")
    return packed


def _lengths(dataset: Dataset) -> np.ndarray:
    return pc.list_value_length(dataset.with_format("arrow")[:]["input_ids"]).to_numpy()
