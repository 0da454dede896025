"""Score base and tuned model on the same rows by greedy answers and by loss on the trained tokens; measure forgetting."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from finetune.data.chat_format import ChatFormat
from finetune.data.pictures.source import PictureSource, source_from_dict
from finetune.data.tool_calls import Answer, display_text
from finetune.errors import DataError, OutOfMemory
from finetune.evaluate.answerer import (
    ANSWER_TOKENS,
    Answerer,
    adapter_folder,
    answer_journal,
    answer_limit,
    answerer_loader,
    batches,
    chat_format_of,
    loss_batch_tokens,
    run_halving,
)
from finetune.evaluate.results import Comparison, Difference, Forgetting, Journal, Score, difference, digest, save_result
from finetune.evaluate.rows import EvalRows, count_trained, file_rows, held_out_rows, probe_rows, run_encoder
from finetune.evaluate.scorers import TOKEN_ACCURACY, RowScore, Scorer, call_score, fitting_score, score_range, scorer
from finetune.model.generate import MoreInputs, extra_model_inputs
from finetune.planner.plan import read_plan
from finetune.run.directory import RunDirectory, require_data
from finetune.units import Progress, format_seconds

_MAX_LOSS = 700.0  # exp() overflows above 709


def compare(
    run: RunDirectory, *, rows: int | None = None, score: Scorer | None = None, data: str | None = None,
    load: Callable[[], Answerer] | None = None, progress: Progress = lambda _: None,
) -> Comparison:  # fmt: skip
    """Score held-out rows, or rows of the file `data`, with base and tuned model.

    Raise DataError for unusable rows, CommandError without an adapter, RecipeError for another base, and OutOfMemory.
    """
    started = time.perf_counter()
    require_data(run)
    plan, encoder = read_plan(run.plan), run_encoder(run)
    tokenizer, chat_format = encoder.tokenizer, chat_format_of(run, encoder)
    eval_rows = held_out_rows(run, rows) if data is None else file_rows(data, run, tokenizer, rows)
    chosen_scorer, why = (score, "") if score else _fitting_scorer(eval_rows)
    max_new_tokens = None
    if chosen_scorer.name != "loss":
        _require_scorable(eval_rows, chosen_scorer)
        max_new_tokens = answer_limit(tokenizer, eval_rows.references, eval_rows.answer_tokens, chat_format)
    folder = adapter_folder(run)
    # a method with a reference is compared with the adapter that the run continued, if any
    against_adapter = bool(plan.settings.training_method.reference_passes) and run.base_adapter.is_dir()
    load = load or answerer_loader(run, progress)
    models = (("origin", run.base_adapter) if against_adapter else ("base", None)), ("tuned", folder)
    # rows without thoughts are asked without a thought; the tuned model learned to answer so by itself
    format_without_thought = None if against_adapter or eval_rows.has_thoughts else chat_format
    base_prompt_end = format_without_thought.before_answer if format_without_thought else ""
    end_ids = tokenizer.encode(base_prompt_end, add_special_tokens=False)
    base_rows = replace(eval_rows, prompt_ids=[[*ids, *end_ids] for ids in eval_rows.prompt_ids])
    # after a kill, the journals have all but the remaining rows
    journals = [answer_journal(run, *model) for model in models]
    outputs = [
        ModelOutputs(load, journal, model_rows, model, max_new_tokens, progress, chat_format)
        for journal, model_rows, (model, _) in zip(journals, (base_rows, eval_rows), models, strict=True)
    ]
    base, tuned = (model_outputs.score(chosen_scorer) for model_outputs in outputs)
    weights, span = None, score_range(chosen_scorer.name, base.scores, tuned.scores)
    if chosen_scorer.name == TOKEN_ACCURACY:
        weights, span = base.row_tokens, 0.0  # the mean of many tokens, as the loss is
    comparison = Comparison(
        len(eval_rows.prompts) if base.answers else len(eval_rows.ids), base, tuned, eval_rows.prompts, eval_rows.references,
        time.perf_counter() - started, score=chosen_scorer.name, score_because=why, data=data,
        exact_match_difference=difference(base.exact, tuned.exact, span=1.0),
        loss_difference=difference(base.row_losses, tuned.row_losses, base.row_tokens),
        score_difference=difference(base.scores, tuned.scores, weights, span=span),
        pairs_in_order_difference=difference(base.in_order, tuned.in_order, span=1.0),
        pair_margin_difference=difference(base.margins, tuned.margins),
        field_differences=_field_differences(*outputs) if chosen_scorer.name == "calls" else {},
        labels_in_order=_labels_in_order(base, tuned, eval_rows.desirable), against_adapter=against_adapter,
        trained_rows=count_trained(run, eval_rows) if data else 0, max_new_tokens=max_new_tokens,
        base_prompt_end=base_prompt_end, reused=sum(model_outputs.reused for model_outputs in outputs),
        notes=sorted({journal.problem for journal in journals} - {""}),
    )  # fmt: skip
    if not comparison.notes:
        suffix = f"-{digest(data)}" if data else ""
        save_result(run, f"scores-{chosen_scorer.name}{suffix}.json", asdict(comparison))
    return comparison


def _fitting_scorer(rows: EvalRows) -> tuple[Scorer, str]:
    name, why = ("calls", "rows with tools") if rows.calls else fitting_score(rows.references)
    if name == "tokens" and len(rows.ids) != len(rows.prompts):
        return scorer("exact"), f"{why} in several sequences a row"
    return scorer(name), why


def _labels_in_order(base: Score, tuned: Score, desirable: list[bool]) -> float | None:
    losses_and_tokens = zip(base.row_losses, tuned.row_losses, base.row_tokens, strict=True)
    gains = [(before - after) * tokens for before, after, tokens in losses_and_tokens]
    labelled_gains = list(zip(gains, desirable, strict=False))  # none for rows without labels
    good_gains = [gain for gain, is_good in labelled_gains if is_good]
    bad_gains = [gain for gain, is_good in labelled_gains if not is_good]
    return _mean([good_gain > bad_gain for good_gain in good_gains for bad_gain in bad_gains])


def _field_differences(base: ModelOutputs, tuned: ModelOutputs) -> dict[str, Difference]:
    # both models have the same fields in each row: `call_score` names them after the expected calls
    base_correct, tuned_correct = _rights_by_field(base.row_scores), _rights_by_field(tuned.row_scores)
    gaps = {name: difference(correct, tuned_correct[name], span=1.0) for name, correct in base_correct.items()}
    return {name: gap for name, gap in gaps.items() if gap}


def _require_scorable(rows: EvalRows, scorer: Scorer) -> None:
    # rows that can't be scored are reported before the model is loaded
    if not rows.prompts:
        raise DataError("no row has a prompt and an answer: they are plain text", "Use --score loss.")
    if scorer.name == "calls":
        if not rows.calls:
            raise DataError("no row has tools or calls", "Use another --score for these rows.")
        return
    if scorer.name == TOKEN_ACCURACY and len(rows.ids) != len(rows.prompts):
        raise DataError("the model's chat template makes several sequences of a row", "Use --score loss.")
    problems, fix = [], ""
    for number, (prompt, reference) in enumerate(zip(rows.prompts, rows.references, strict=True), 1):
        try:
            scorer.score_answer(prompt, reference, reference)
        except DataError as error:
            problems.append(f"row {number}: {error.problems[0]}")
            fix = error.fix
    if problems:
        others = [f"and {len(problems) - 5:,} other row(s)"] if len(problems) > 5 else []
        raise DataError([*problems[:5], *others], fix)


class ModelOutputs:
    """Answers and losses of one model, from an earlier evaluation or computed now."""

    def __init__(
        self, load: Callable[[], Answerer], journal: Journal, rows: EvalRows, model: str, max_new_tokens: int | None,
        progress: Progress, chat_format: ChatFormat | None = None,
    ) -> None:  # fmt: skip
        self._load, self._journal, self._rows, self._format = load, journal, rows, chat_format
        self.row_scores: list[RowScore] = []
        self._progress, self._model, self._max_new_tokens = progress, model, max_new_tokens
        self.reused = 0
        decoding = ["with special tokens"] if chat_format else []  # of the answers, which are read with the format
        prompt_digests = _picture_digests(rows.prompt_pictures, rows.prompt_ids)
        # without a limit of new tokens, only losses are computed
        prompts = zip(rows.prompt_ids, prompt_digests, strict=True) if max_new_tokens else ()
        self._answer_keys = [digest([ids, max_new_tokens, *decoding, *pictures]) for ids, pictures in prompts]
        self._sequences = list(zip((*rows.ids, *rows.rejected_ids), (*rows.labels, *rows.rejected_labels), strict=True))
        sequences = zip(self._sequences, _picture_digests(rows.pictures, self._sequences), strict=True)
        self._loss_keys = [digest([*ids_and_labels, *pictures]) for ids_and_labels, pictures in sequences]
        lengths = [len(ids) + (max_new_tokens or 0) for ids in rows.prompt_ids]
        self._run_batches(self._answer_keys, lengths, self._add_answers, "answered")
        self._run_batches(self._loss_keys, [len(ids) for ids, _ in self._sequences], self._add_losses, "read")

    def _run_batches(self, keys: list[str], lengths: list[int], work: Callable[[list[int]], None], verb: str) -> None:
        entries = self._journal.entries
        if all(key in entries for key in keys):
            self.reused += len(keys)
            return
        answerer = self._load()
        batch_tokens = ANSWER_TOKENS[answerer.device] if verb == "answered" else loss_batch_tokens(answerer.model)
        # the same batches as in a killed evaluation, without the complete ones
        remaining = [batch for batch in batches(lengths, batch_tokens) if any(keys[row] not in entries for row in batch)]
        finished = reused = len(keys) - sum(map(len, remaining))
        self.reused += reused
        started = time.monotonic()
        with answerer.using(self._model):
            for batch in remaining:
                time_left = ""
                if finished > reused:
                    seconds = (time.monotonic() - started) / (finished - reused) * (len(keys) - finished)
                    time_left = f", about {format_seconds(seconds)} left"
                self._progress(f"{self._model} model: {finished:,} of {len(keys):,} rows {verb}{time_left}")
                try:
                    run_halving(batch, work)
                except torch.OutOfMemoryError:
                    raise OutOfMemory(
                        f"a row of {max(lengths[row] for row in batch):,} tokens does not fit in memory beside the model",
                        "Leave long rows out, or close other programs.",
                    ) from None
                finished += len(batch)

    def _add_answers(self, batch: list[int]) -> None:
        prompts = [self._rows.prompt_ids[row] for row in batch]
        answers = self._load().answer(
            prompts, max_new_tokens=self._max_new_tokens or 1, with_special_tokens=self._format is not None,
            pictures=_sources(self._rows.prompt_pictures, batch),
        )  # fmt: skip
        self._journal.add({
            self._answer_keys[row]: {"answer": answer, "is_cut": is_cut}
            for row, (answer, is_cut) in zip(batch, answers, strict=True)
        })  # fmt: skip

    def _add_losses(self, batch: list[int]) -> None:
        answerer, sequences = self._load(), [self._sequences[row] for row in batch]
        picture_inputs = answerer.more_inputs(_sources(self._rows.pictures, batch)) if self._rows.pictures else None
        entries = losses(answerer.model, sequences, answerer.device, picture_inputs)
        self._journal.add({self._loss_keys[row]: entry for row, entry in zip(batch, entries, strict=True)})

    def score(self, scorer: Scorer) -> Score:
        entries, rows = self._journal.entries, self._rows
        chosen_keys, rejected_keys = self._loss_keys[: len(rows.ids)], self._loss_keys[len(rows.ids) :]
        loss_entries, rejected_entries = ([entries[key] for key in keys] for keys in (chosen_keys, rejected_keys))
        loss_sums, rejected_sums = (
            [entry["loss"] * entry["tokens"] for entry in answer_entries] for answer_entries in (loss_entries, rejected_entries)
        )
        pairs = zip(loss_sums, rejected_sums, strict=True) if rejected_keys else ()
        margins = [rejected - chosen for chosen, rejected in pairs]
        row_losses, row_tokens = [entry["loss"] for entry in loss_entries], [entry["tokens"] for entry in loss_entries]
        loss = sum(loss_sums) / sum(row_tokens) if any(row_tokens) else None
        answer_entries = [entries[key] for key in self._answer_keys]
        answers = [Answer(entry["answer"]) for entry in answer_entries]
        if self._format:
            for row, entry in enumerate(answer_entries):
                tools = rows.tools[row] if rows.tools else None
                if tools == [] and not rows.calls[row] and self._format.read(rows.references[row], tools).calls:
                    tools = None  # the expected answer is text that looks like a call
                answers[row] = self._format.read(entry["answer"], tools, is_cut=entry["is_cut"])
        texts = [display_text(answer) for answer in answers]  # none if only losses were computed: so no strict zips below
        if scorer.name == "calls":
            expected_calls = zip(rows.calls, rows.tools, answers, strict=False)
            row_scores = [call_score(calls, tools, answer) for calls, tools, answer in expected_calls]
        elif scorer.name == TOKEN_ACCURACY:
            row_scores = [RowScore(entry["right"] / max(1, entry["tokens"])) for entry in loss_entries]
        else:
            row_scores = [
                scorer.score_answer(prompt, reference, text)
                for prompt, reference, text in zip(rows.prompts, rows.references, texts, strict=False)
            ]
        self.row_scores = row_scores
        accuracy = sum(entry["right"] for entry in loss_entries) / sum(row_tokens) if any(row_tokens) else None
        exact = [text.strip() == reference.strip() for text, reference in zip(texts, rows.references, strict=False)]
        scores = [row_score.score for row_score in row_scores]
        return Score(
            _mean(exact), loss, texts, exact=exact, row_losses=row_losses, row_tokens=row_tokens,
            perplexity=math.exp(loss) if loss is not None and loss < _MAX_LOSS else None, token_accuracy=accuracy,
            score=accuracy if scorer.name == TOKEN_ACCURACY else _mean(scores), scores=scores,
            valid=_mean([row_score.valid for row_score in row_scores if row_score.valid is not None]),
            fields={name: sum(rights) / len(rights) for name, rights in _rights_by_field(row_scores).items()},
            margins=margins, pair_margin=_mean(margins), pairs_in_order=_mean([margin > 0 for margin in margins]),
            thoughts=[answer.thought for answer in answers], cut=sum(entry["is_cut"] for entry in answer_entries),
        )  # fmt: skip


def _picture_digests(pictures: list[list[dict[str, Any]]], rows: list[Any]) -> list[list[str]]:
    return [[picture["digest"] for picture in row_pictures] for row_pictures in pictures] or [[]] * len(rows)


def _sources(pictures: list[list[dict[str, Any]]], rows: list[int]) -> list[list[PictureSource]]:
    return [[source_from_dict(picture) for picture in pictures[row]] for row in rows] if pictures else []


def _mean(values: list[Any]) -> float | None:
    return sum(values) / len(values) if values else None


def _rights_by_field(row_scores: list[RowScore]) -> dict[str, list[bool]]:
    rights_by_field: dict[str, list[bool]] = {}
    for row_score in row_scores:
        for name, is_right in row_score.fields.items():
            rights_by_field.setdefault(name, []).append(is_right)
    return rights_by_field


@torch.inference_mode()
def losses(
    model: Any, sequences: Iterable[tuple[list[int], list[int]]], device: str, more_inputs: MoreInputs | None = None
) -> list[dict[str, Any]]:
    """Compute one batch: each sequence's mean loss (nats), number and correct predictions of trained tokens."""
    id_rows, label_rows = ([torch.tensor(row, dtype=torch.long) for row in column] for column in zip(*sequences, strict=True))
    ids = pad_sequence(id_rows, batch_first=True).to(device)
    mask = pad_sequence([torch.ones_like(row) for row in id_rows], batch_first=True).to(device)
    labels = pad_sequence(label_rows, batch_first=True, padding_value=-100).to(device)[:, 1:]
    trained = labels != -100
    extra_inputs = extra_model_inputs(ids, more_inputs)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **extra_inputs).logits[:, :-1][trained].float()
    token_losses = torch.nn.functional.cross_entropy(logits, labels[trained], reduction="none")
    is_right = logits.argmax(dim=-1) == labels[trained]
    counts = trained.sum(dim=1).tolist()
    return [
        {"loss": row_losses.sum().item() / count if count else 0.0, "tokens": count, "right": int(row_rights.sum())}
        for count, row_losses, row_rights in zip(counts, token_losses.split(counts), is_right.split(counts), strict=True)
    ]


def measure_forgetting(run: RunDirectory, load: Callable[[], Answerer], progress: Progress = lambda _: None) -> Forgetting:
    """Measure the loss on general questions."""
    rows, models = probe_rows(run_encoder(run)), (("base", None), ("tuned", adapter_folder(run)))
    before, now = score_models(run, load, rows, models, "loss", None, progress)
    loss_difference = difference(before.row_losses, now.row_losses, before.row_tokens)
    result = Forgetting(len(rows.ids), before.loss, now.loss, loss_difference)
    save_result(run, "lost.json", asdict(result))
    return result


def score_models(
    run: RunDirectory, load: Callable[[], Answerer], rows: EvalRows, models: Iterable[tuple[str, Path | None]], score: str,
    max_new_tokens: int | None, progress: Progress,
) -> list[Score]:  # fmt: skip
    """Return the `score` of each (model, adapter)."""
    outputs = (
        ModelOutputs(load, answer_journal(run, model, adapter), rows, model, max_new_tokens, progress)
        for model, adapter in models
    )
    return [model_outputs.score(scorer(score)) for model_outputs in outputs]
