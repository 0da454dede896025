"""Rows of an evaluation: held-out rows, rows of a file, or bundled questions."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from datasets import load_from_disk
from transformers import PreTrainedTokenizerBase

from finetune.bundled import PROBE
from finetune.data.checks import BadRow
from finetune.data.conversation import Example
from finetune.data.report import refusal_lines
from finetune.data.splits import LimitedSplit
from finetune.data.tokenizer import ProcessorLoader, read_tokenizer
from finetune.data.tokens import Encoder
from finetune.errors import DataError
from finetune.files import parse_json, read_json
from finetune.planner.plan import read_plan
from finetune.run.directory import RunDirectory
from finetune.settings import DatasetRecipe, Settings
from finetune.settings.methods import METHOD_FORMATS

#: Column of the tokenised held-out rows -> field of EvalRows. Only pairs have rejected columns, only labelled rows `desirable`.
_SEQUENCE_FIELDS = {
    "input_ids": "ids", "labels": "labels", "rejected_input_ids": "rejected_ids", "rejected_labels": "rejected_labels",
    "desirable": "desirable", "pictures": "pictures",
}  # fmt: skip


@dataclass(frozen=True)
class EvalRows:
    """Prompts with expected answers, and sequences whose loss is computed."""

    #: The first three lists leave out rows of plain text, which have no prompt, and answers marked bad.
    prompts: list[str] = field(default_factory=list)
    prompt_ids: list[list[int]] = field(default_factory=list)
    references: list[str] = field(default_factory=list)  # expected answers
    #: A chat template may render several sequences of a row. Of pairs these are the chosen answers.
    ids: list[list[int]] = field(default_factory=list)
    labels: list[list[int]] = field(default_factory=list)
    rejected_ids: list[list[int]] = field(default_factory=list)  # in the order of `ids`
    rejected_labels: list[list[int]] = field(default_factory=list)
    desirable: list[bool] = field(default_factory=list)  # whether each labelled answer is marked good
    #: Expected calls and offered tools of each row; both are empty if no row has tools.
    calls: list[list[dict[str, Any]]] = field(default_factory=list)
    tools: list[list[dict[str, Any]]] = field(default_factory=list)
    answer_tokens: int = 0  # of the longest expected answer with its thought
    has_thoughts: bool = False
    #: Images of each prompt, and of each sequence; both are empty without images.
    prompt_pictures: list[list[dict[str, Any]]] = field(default_factory=list)
    pictures: list[list[dict[str, Any]]] = field(default_factory=list)


def run_encoder(run: RunDirectory) -> Encoder:
    """Return the encoder of a run's prompts."""
    settings, folder = read_plan(run.plan).settings, run.data / "tokenizer"
    tokenizer = read_tokenizer(folder, settings)
    processor_loader = ProcessorLoader(settings, folder) if settings.vision else None
    return Encoder(tokenizer, with_template=tokenizer.chat_template is not None, processor_loader=processor_loader)


def held_out_rows(run: RunDirectory, limit: int | None) -> EvalRows:
    """Return at most `limit` held-out rows of a run. Raise DataError without rows."""
    path = run.data / "eval_examples.json"
    sequences: dict[str, Any] = {}
    try:
        rows = _eval_rows(read_json(path, list)[:limit])
        if (run.data / "eval").is_dir():
            path = run.data / "eval"
            dataset: Any = load_from_disk(str(path))
            dataset = dataset.select(range(min(len(dataset), limit or len(dataset))))
            sequences = {field: list(dataset[name]) for name, field in _SEQUENCE_FIELDS.items() if name in dataset.column_names}
    except Exception as error:  # noqa: BLE001 - the library `datasets` raises whatever its code meets
        problem = f"{path} can't be read: {type(error).__name__}: {str(error)[:200]}"
        raise DataError(problem, "Use your own rows: --data FILE.") from None
    if not rows.prompts and not sequences.get("ids"):
        raise DataError(
            f"{run.path} has no held-out rows",
            "Use your own rows: --data FILE. Or set dataset.eval_path=FILE or dataset.test_split_size=0.1 and run again.",
        )
    return replace(rows, **sequences)


def file_rows(path: str, run: RunDirectory, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> EvalRows:
    """Return at most `limit` rows of a file, read like the run's data. Raise DataError."""
    from finetune.data.preparation import questions_of

    settings = read_plan(run.plan).settings
    processor_loader = ProcessorLoader(settings, run.data / "tokenizer") if settings.vision else None
    encoder = Encoder(tokenizer, train_on_inputs=settings.train_on_inputs, processor_loader=processor_loader)
    split = _read_like_training(settings, path, limit, encoder)
    if split.refused and settings.dataset.on_bad_rows == "fail":
        raise DataError(refusal_lines(split.refused, split.unlimited.rows_read), "Correct these rows.")
    if not split.used.any():
        raise DataError(f"{path}: no row can be used", "Use a file with prompts and answers.")
    sequences: dict[str, Any] = {_SEQUENCE_FIELDS[name]: values for name, values in split.table().to_pydict().items()}
    return replace(_eval_rows(questions_of(split.examples, encoder)), **sequences)


def _read_like_training(settings: Settings, path: str, limit: int | None, encoder: Encoder) -> LimitedSplit:
    from finetune.data.preparation import rows_to_evaluate

    dataset = DatasetRecipe(
        path=path, columns=settings.dataset.columns, ignore_columns=settings.dataset.ignore_columns,
        json_columns=settings.dataset.json_columns, image_folder=settings.dataset.image_folder, max_rows=limit,
    )  # fmt: skip
    method_format = settings.training_method.row_format
    # Rows in the format of the run's method are read in that format, others by their columns.
    # Pairs are read as pairs even where a run trains on single answers: a pair says more than its answers do.
    first = "preference" if method_format in METHOD_FORMATS else method_format
    for row_format in dict.fromkeys([first, method_format, *METHOD_FORMATS]) if method_format else []:
        with contextlib.suppress(DataError):
            return rows_to_evaluate(dataset.model_copy(update={"format": row_format}), encoder)
    return rows_to_evaluate(dataset, encoder)


def count_trained(run: RunDirectory, rows: EvalRows) -> int:
    """Count the sequences that the run was trained on."""
    sequences = [np.asarray(ids, dtype=np.int64).tobytes() for ids in rows.ids]
    evaluated, trained = set(sequences), set[bytes]()
    dataset: Any = load_from_disk(str(run.data / "train"))
    for batch in dataset.with_format("numpy").iter(batch_size=1_000):
        # a packed sequence has several rows
        lengths = batch["seq_lengths"] if "seq_lengths" in batch else [[len(ids)] for ids in batch["input_ids"]]
        for ids, row_lengths in zip(batch["input_ids"], lengths, strict=True):
            packed_rows = np.split(np.asarray(ids, dtype=np.int64), np.cumsum(row_lengths)[:-1])
            trained |= evaluated.intersection(row.tobytes() for row in packed_rows)
    return sum(sequence in trained for sequence in sequences)


def probe_rows(encoder: Encoder) -> EvalRows:
    """Return the bundled general questions, in the encoder's chat template if any."""
    examples = []
    for row in map(parse_json, PROBE.read_text(encoding="utf-8").splitlines()):
        if encoder.template is None:
            examples.append(Example(PROBE.name, 0, prompt=f"{row['prompt']}\n", completion=row["completion"]))
        else:
            messages = {"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}
            examples.append(Example(PROBE.name, 0, messages=messages, answers=(1,)))
    sequences = [sequence for result in encoder.encode(examples) if not isinstance(result, BadRow) for sequence in result]
    ids, labels = ([getattr(sequence, name).tolist() for sequence in sequences] for name in ("input_ids", "labels"))
    return EvalRows(ids=ids, labels=labels)


def _eval_rows(questions: list[dict[str, Any]]) -> EvalRows:
    def column(key: str, if_any_has: str) -> list[Any]:
        return [row.get(key) or [] for row in questions] if any(if_any_has in row for row in questions) else []

    prompts, prompt_ids, answers = ([row[name] for row in questions] for name in ("prompt", "prompt_ids", "answer"))
    return EvalRows(
        prompts, prompt_ids, answers, calls=column("calls", if_any_has="calls"), tools=column("tools", if_any_has="calls"),
        answer_tokens=max((int(row.get("answer_tokens") or 0) for row in questions), default=0),
        prompt_pictures=column("pictures", if_any_has="pictures"), has_thoughts=any(row.get("thought") for row in questions),
    )  # fmt: skip
