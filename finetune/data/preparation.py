"""Turn a recipe's dataset into tokens for the trainer, and a report."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.chat_format import thought_and_text
from finetune.data.conversation import Example
from finetune.data.pictures.placement import text_pieces
from finetune.data.pictures.source import source_from_dict, source_to_dict
from finetune.data.report import DataReport, Finding, refusal_lines
from finetune.data.shards import PICTURES, StoredRows, TokenisedSource
from finetune.data.sources import Source, sources_of, split_notes
from finetune.data.splits import DataSplit, LimitedSplit, find_leaks, find_problems
from finetune.data.token_cache import tokenise_source
from finetune.data.tokenizer import ProcessorLoader
from finetune.data.tokens import Encoder
from finetune.data.tool_calls import Answer, display_text
from finetune.errors import DataError
from finetune.settings import DatasetRecipe, Recipe
from finetune.settings.schema import DEFAULT_SHARE, LEAST_ROWS

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from finetune.data.pictures.source import PictureSource

#: Called with the number of tokenised rows and the number of all rows, None if unknown.
Progress = Callable[[int, int | None], None]


@dataclass
class EncodedRows:
    """The tokens of each row, or why it has none, before max_length applies."""

    encoder: Encoder
    splits: list[DataSplit]
    notes: list[str] = field(default_factory=list)  # which files are read as which split
    trained_embedding_rows: list[int] = field(default_factory=list)  # first and end of the embedding rows that are trained

    def select(self, recipe: Recipe, max_length: int | None) -> SelectedRows:
        """Apply a max_length; None is no limit."""
        splits = [LimitedSplit(split, max_length, recipe.excess_length) for split in self.splits]
        return SelectedRows(self, recipe, max_length, splits)


@dataclass
class SelectedRows:
    """The rows used under one max_length, and why others are left out."""

    encoded: EncodedRows
    recipe: Recipe
    max_length: int | None
    splits: list[LimitedSplit]

    @cached_property
    def train(self) -> Dataset:
        """Return the training sequences: input_ids and labels."""
        return self.splits[0].dataset(f"{self.fingerprint}-train")

    @cached_property
    def eval(self) -> Dataset | None:
        return self.splits[1].dataset(f"{self.fingerprint}-eval") if len(self.splits) > 1 else None

    @cached_property
    def lengths(self) -> list[int]:
        """Return the number of tokens of each training sequence."""
        return self.splits[0].lengths.tolist()

    @property
    def is_plain(self) -> bool:
        """Return whether each training row is a prompt and a completion, without a chat template."""
        return bool(self.splits[0].stored.has("pair")[self.splits[0].used].all())

    def sequence(self, index: int = 0) -> tuple[list[int], list[int], tuple[PictureSource, ...]]:
        """Return ids, labels and images of a training sequence, empty without sequences."""
        # unlike `train`, the table doesn't import datasets, which takes a second
        for row in self.splits[0].table(index + 1).slice(index, 1).to_pylist():
            return row["input_ids"], row["labels"], tuple(map(source_from_dict, row.get(PICTURES, ())))
        return [], [], ()

    @cached_property
    def report(self) -> DataReport:
        return self.splits[0].report(self.findings[0])

    @cached_property
    def eval_report(self) -> DataReport | None:
        return self.splits[1].report(self.findings[1]) if len(self.splits) > 1 else None

    @cached_property
    def findings(self) -> list[tuple[Finding, ...]]:
        """Return the findings of each split."""
        # a Finding formats its text, so braces are doubled
        notes = [Finding("splits", note.replace("{", "{{").replace("}", "}}")) for note in self.encoded.notes]
        leaks = find_leaks(*self.encoded.splits) if len(self.splits) > 1 else ()
        train, *held_out = (tuple(find_problems(split)) for split in self.splits)
        return [(*notes, *leaks, *train), *held_out]

    @property
    def notes(self) -> list[str]:
        """Return remarks on file choice and unused columns."""
        columns = self.splits[0].unlimited.unused_columns
        unused = [f"columns not used: {', '.join(columns)}"] if columns else []
        return self.encoded.notes + unused

    def raise_problems(self) -> None:
        """Raise DataError with every reason against training on this data."""
        splits, recipe, max_length = self.splits, self.recipe, self.max_length
        refused = [row for split in splits for row in split.refused]
        rows_read = sum(split.unlimited.rows_read for split in splits if not split.unlimited.split_off)
        too_long = sum(int(split.too_long.sum()) for split in splits)
        problems, fixes = [], []
        if refused and recipe.dataset.on_bad_rows == "fail":
            problems += refusal_lines(refused, rows_read)
            in_recipe = "(in the recipe on_bad_rows: skip, under dataset)"
            fixes.append(f"Correct these rows, or leave them out:  dataset.on_bad_rows=skip  {in_recipe}")
            if any(row.reason.endswith(", not text") for row in refused):
                fixes.append("To write objects and numbers as JSON, list their columns in dataset.json_columns.")
        if too_long and recipe.excess_length in ("raise", "chunk"):
            longest = sorted((entry for split in splits for entry in split.longest_rows()), key=lambda entry: -entry[1])
            problems.append(f"{too_long:,} row(s) are longer than max_length {max_length:,} tokens; the longest:")
            problems += [f"  {file}, row {row}: {length:,} tokens" for (file, row), length in longest[:5]]
            fixes.append(
                f"Raise max_length (up to {longest[0][1]}; costs memory), or  excess_length=truncate  or  excess_length=drop"
            )
            if recipe.excess_length == "chunk":
                fixes.append("Only rows of plain text are cut into chunks.")
        if not problems and any(not len(split.lengths) for split in splits):
            if len(splits[0].lengths):
                problems.append("no held-out row can be used")
            else:
                problems += ["no row is left to train on", *(refusal_lines(refused, rows_read, 5) if refused else [])]
            problems += [f"{too_long:,} row(s) are longer than max_length {max_length:,} tokens"] if too_long else []
            fixes.append("`finetune data RECIPE --json` lists every refused row.")
        if problems:
            raise DataError(problems, "\n".join(fixes))
        accepted = recipe.dataset.accept_findings
        blocking = [finding for finding in self.findings[0] if finding.blocks and finding.kind not in accepted]
        if blocking:
            kinds = ", ".join(finding.kind for finding in blocking)
            raise DataError(list(map(str, blocking)), f"To train on it anyway:  dataset.accept_findings=[{kinds}]")

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the rows and of the settings that change their tokens."""
        recipe, encoder = self.recipe, self.encoded.encoder
        template = encoder.template and encoder.template.source
        settings: list[Any] = [self.max_length, recipe.excess_length, recipe.train_on_inputs, template]
        identity = [encoder.tokenizer.special_tokens_map, sorted(encoder.stops), encoder.vocabulary_digest]
        hashed = sha256(json.dumps([settings, identity], sort_keys=True, default=str).encode())
        for split in self.splits:
            hashed.update(b"side" + split.stored.content_digests[split.used].tobytes())  # "side" separates the splits
        return hashed.hexdigest()


def encode(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, sources: tuple[list[Source], list[Source]] | None = None,
    progress: Progress = lambda *_: None,
) -> EncodedRows:  # fmt: skip
    """Tokenise the dataset, or load it from the cache. Raise DataError or RecipeError."""
    dataset = recipe.dataset
    if row_format := recipe.training_method.row_format:
        dataset = dataset.model_copy(update={"format": row_format})
    train_sources, eval_sources = sources or sources_of(dataset)
    encoder = Encoder(tokenizer, train_on_inputs=recipe.train_on_inputs, processor_loader=ProcessorLoader(recipe))
    line_counts = [source.info.line_count for source in (*train_sources, *eval_sources)]
    # unknown if a file has no row per line, or if `max_rows` ends the reading
    total = None if dataset.max_rows is not None or None in line_counts else sum(filter(None, line_counts))
    train = _load_rows(train_sources, dataset, encoder, lambda rows: progress(rows, total))
    train_rows = sum(part.rows_read for part in train.sources)
    unlimited = dataset.model_copy(update={"max_rows": None})
    held_out = _load_rows(eval_sources, unlimited, encoder, lambda rows: progress(train_rows + rows, total))
    # cached tokens did not load the template, which later checks need
    if any(stored.has("conversation").any() for stored in (train, held_out)):
        encoder.use_template()
    splits = [DataSplit(train, np.ones(len(train), dtype=bool))]
    notes = split_notes(dataset, train_sources, eval_sources)
    if eval_sources:
        splits.append(DataSplit(held_out, np.ones(len(held_out), dtype=bool)))
        return EncodedRows(encoder, splits, notes)
    mask = _held_out_mask(train.prompt_digests, dataset.test_split_size, recipe.seed)
    if mask.any():
        splits = [DataSplit(train, ~mask), DataSplit(train, mask, split_off=True)]
        if dataset.test_split_size is None:
            notes.append(f"{mask.sum():,} of {len(mask):,} rows are held out; to train on all: dataset.test_split_size=0")
    return EncodedRows(encoder, splits, notes)


def _held_out_mask(prompt_digests: np.ndarray, size: float | None, seed: int) -> np.ndarray:
    digests, total = prompt_digests.tolist(), len(prompt_digests)
    is_default = size is None
    if size is None:
        size = DEFAULT_SHARE if total >= LEAST_ROWS else 0
    if not size:
        return np.zeros(total, dtype=bool)
    target_rows = max(1, round(total * size)) if size < 1 else int(size)
    if target_rows >= total:
        problem = f"dataset.test_split_size holds out {target_rows:,} of {total:,} usable rows; none are left to train on"
        raise DataError(problem, "Hold out fewer rows, or none:  dataset.test_split_size=0")
    # rows with the same prompt stay together, so no held-out prompt is trained on
    row_counts = Counter(digests)
    shuffled = list(row_counts)
    random.Random(seed).shuffle(shuffled)
    held_out_digests: set[int] = set()
    held_out_rows = 0
    for digest in shuffled:
        if held_out_rows + row_counts[digest] <= target_rows:
            held_out_digests.add(digest)
            held_out_rows += row_counts[digest]
    if not held_out_digests and not is_default:
        problem = "dataset.test_split_size: all rows have the same prompt; none can be held out"
        raise DataError(problem, "Give other rows with dataset.eval_path.")
    return np.array([digest in held_out_digests for digest in digests])


def rows_to_evaluate(dataset: DatasetRecipe, encoder: Encoder) -> LimitedSplit:
    """Return a dataset's held-out rows, or all rows if none are held out."""
    sources, eval_sources = sources_of(dataset)
    stored = _load_rows(eval_sources or sources, dataset, encoder, lambda _: None)
    return LimitedSplit(DataSplit(stored, np.ones(len(stored), dtype=bool)), None, "raise")


def questions_of(examples: Iterable[Example], encoder: Encoder) -> list[dict[str, Any]]:
    """Return prompt, prompt tokens and answer of each row, with thought, calls and images if any."""
    rows = []
    for example in examples:
        question, answer = example.question(), example.reference()
        thought, calls = "", list[Any]()
        if example.messages:
            message = example.messages[example.answers[-1]]
            calls = list(message.get("tool_calls") or ())
            thought, text = thought_and_text(message)
            answer = display_text(Answer(text, calls))
        # plain text has no prompt, and an answer marked bad is no reference
        if not question or answer is None or example.desirable is False:
            continue
        if isinstance(question, str):
            prompt = question
        elif "pictures" in question[-1]:
            prompt = " ".join(text_pieces(question[-1]))
        else:
            prompt = question[-1]["content"]
        prompt_ids = encoder.prompt_ids(question, example.tools, example.pictures)
        row: dict[str, Any] = {"prompt": prompt, "prompt_ids": prompt_ids, "answer": answer}
        if example.messages:
            messages = list(example.messages[: example.answers[-1] + 1])
            all_ids = encoder.conversation_ids(messages, example.tools, pictures=example.pictures)
            row |= {"thought": thought, "answer_tokens": max(0, len(all_ids) - len(prompt_ids))}  # with the thought
        if example.tools or calls:
            row |= {"tools": list(example.tools), "calls": calls}
        if example.pictures:
            row["pictures"] = [source_to_dict(picture) for picture in example.pictures]
        rows.append(row)
    return rows


def _load_rows(sources: list[Source], dataset: DatasetRecipe, encoder: Encoder, progress: Callable[[int], None]) -> StoredRows:
    parts: list[TokenisedSource] = []

    def rows_read() -> int:
        return sum(part.rows_read for part in parts)

    for source in sources:
        if rows_read() == dataset.max_rows:
            break
        limit = None if dataset.max_rows is None else dataset.max_rows - rows_read()
        parts.append(tokenise_source(source, dataset, limit, encoder, lambda rows: progress(rows_read() + rows)))
    return StoredRows(parts)
