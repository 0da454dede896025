"""Run tasks of EleutherAI's lm-evaluation-harness on base and tuned model, with the run's chat template."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import torch

from finetune.errors import CommandError, DataError, OutOfMemory, PackagesError
from finetune.evaluate.answerer import Answerer, adapter_folder, answer_journal
from finetune.evaluate.kv_cache import batch_token_limit, loss_batch_tokens
from finetune.evaluate.paired import difference
from finetune.evaluate.results import TASKS_FILE, Journal, TaskScore, answers_without_thoughts, digest, read_tasks, save_result
from finetune.printable import Progress
from finetune.requirements import DISTRIBUTION
from finetune.run.directory import RunDirectory, require_data

_EXAMPLES_SEED = 1234  # of the examples in a prompt, as in the harness's own command
_MAX_BATCH = 64
_ANSWER_TOKENS = 256  # the harness's limit of an answer where a task has none


def measure_tasks(
    run: RunDirectory, tasks: Sequence[str], *, rows: int | None = None, last: bool = False, progress: Progress = lambda _: None
) -> list[TaskScore]:
    """Score tasks on their first `rows` rows, and save the scores. Raise PackagesError, CommandError or DataError."""
    if not importlib.util.find_spec("lm_eval"):
        problem = f"--tasks needs lm-eval, which is not installed (the extra 'tasks' of {DISTRIBUTION})"
        raise PackagesError(problem, "Install it: pip install 'lm-eval>=0.4.13,<0.5'")
    require_data(run)
    folder = adapter_folder(run, last=last)
    loaded_tasks = _load_tasks(tasks)
    progress("loading base model and adapter")
    answerer = Answerer(run, last=last)
    results = {}
    for model, adapter in (("base", None), ("tuned", folder)):
        with answerer.using(model):
            # every answer is saved in the run, so an interrupted evaluation continues
            journal = answer_journal(run, f"tasks-{model}", adapter)
            results[model] = _evaluate(answerer, journal, loaded_tasks, rows, model, progress)
    scores = _compare(results["base"], results["tuned"])
    measured = {score.task for score in scores}
    others = [score for score in read_tasks(run) if score.task not in measured]
    save_result(run, TASKS_FILE, {"tasks": [asdict(score) for score in (*others, *scores)]})
    return scores


def _load_tasks(tasks: Sequence[str]) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    for name in ("lm_eval", "transformers"):  # which warn of a model given as an object, and of two limits of an answer
        logging.getLogger(name).setLevel(logging.ERROR)
    names = [name for task in tasks if (name := task.strip())]
    if not names:
        raise CommandError("--tasks names no task", "For example --tasks gsm8k,ifeval")
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    manager = TaskManager(include_defaults=len(files) < len(names))  # the index of all tasks takes seconds
    specs: list[str] = []
    for name in names:
        matches = [name] if name in files else manager.match_tasks([name])
        if not matches:
            similar = difflib.get_close_matches(name, manager.all_tasks, 3)
            raise CommandError(
                f"lm-eval has no task {name[:80]!r}{'; similar: ' if similar else ''}{', '.join(similar)}",
                "See all:  lm-eval ls tasks  (a file of your own: --tasks ./task.yaml)",
            )
        specs += matches
    try:
        # the harness downloads the datasets of the named tasks
        loaded: dict[str, Any] = dict(manager.load(list(dict.fromkeys(specs))))
    except Exception as error:  # a dataset that can't be fetched, a file that is no task: many libraries' own errors
        problem = f"the tasks {', '.join(names)} can't be loaded: {type(error).__name__}: {str(error)[:300]}"
        raise DataError(problem, "Check the name, the file, and the connection: tasks download their datasets.") from error
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_EXAMPLES_SEED)
    return loaded


def _evaluate(
    answerer: Answerer, journal: Journal, tasks: dict[str, Any], rows: int | None, model: str, progress: Progress
) -> dict[str, Any]:
    from lm_eval.evaluator import evaluate

    has_template = not answerer.plain and answerer.tokenizer.chat_template is not None
    try:
        return dict(evaluate(
            _harness_model(answerer, journal, model, progress), tasks, limit=rows, bootstrap_iters=0, log_samples=True,
            apply_chat_template=has_template, fewshot_as_multiturn=has_template,
        ) or {})  # fmt: skip
    except (ValueError, ImportError, KeyError) as error:  # among them tasks that run code, and metrics that are not installed
        problem = f"{', '.join(tasks['tasks'])} can't be scored: {type(error).__name__}: {str(error)[:300]}"
        raise DataError(problem, "Leave the task out, or run lm-eval itself on the merged model.") from error


def _harness_model(answerer: Answerer, journal: Journal, name: str, progress: Progress) -> Any:
    from lm_eval.models.huggingface import HFLM

    # asked without a thought: a task's stop strings or limit could end the answer within one
    format_without_thought = answers_without_thoughts(answerer.run) and answerer.chat_format
    prompt_end = format_without_thought.before_answer if format_without_thought else ""

    class JournalledModel(HFLM):
        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            text = super().apply_chat_template(chat_history, add_generation_prompt)
            return f"{text}{prompt_end}" if add_generation_prompt else str(text)

        def _complete(self, kind: str, requests: list[Any], disable_tqdm: bool = True) -> list[Any]:
            keys = [digest([kind, *request.args]) for request in requests]
            batch_size = 0  # chosen by memory, halved if that is too much
            # only answers that the journal lacks
            while remaining := {
                key: request for key, request in zip(keys, requests, strict=True) if key not in journal.entries
            }:
                self.batch_size_per_gpu = batch_size or _batch_size(answerer, kind, [*remaining.values()], self.max_length)
                progress(f"{name} model: {len(requests) - len(remaining):,} of {len(requests):,} answers computed")
                try:
                    results = getattr(super(), kind)([*remaining.values()], disable_tqdm=True)
                except torch.OutOfMemoryError:
                    batch_size = self.batch_size_per_gpu // 2
                    if batch_size == 0:
                        problem = "a row of the task does not fit in memory beside the model"
                        raise OutOfMemory(problem, "Choose another task, or close other programs.") from None
                    continue
                computed = zip(remaining, results, strict=True)
                # `add_partial` has added most of them
                journal.add({key: {"result": result} for key, result in computed if key not in journal.entries})
            results = [journal.entries[key]["result"] for key in keys]
            return [tuple(result) if isinstance(result, list) else result for result in results]  # JSON has lists for tuples

        loglikelihood = partialmethod(_complete, "loglikelihood")
        loglikelihood_rolling = partialmethod(_complete, "loglikelihood_rolling")
        generate_until = partialmethod(_complete, "generate_until")

    def add_partial(kind: str, arguments: tuple[Any, ...], result: Any) -> None:
        journal.add({digest([kind, *arguments]): {"result": result}})

    model = JournalledModel(answerer.model, backend="causal", tokenizer=answerer.tokenizer)
    model.set_cache_hook(SimpleNamespace(add_partial=add_partial))  # the harness calls it with each computed result
    return model


def _batch_size(answerer: Answerer, kind: str, requests: list[Any], max_length: int) -> int:
    longest = max(requests, key=lambda request: sum(len(text) for text in request.args if isinstance(text, str)))
    text = "".join(text for text in longest.args if isinstance(text, str))
    row_tokens = min(max_length, len(answerer.tokenizer(text, add_special_tokens=False)["input_ids"]) + 1)
    if kind == "generate_until":
        row_tokens += int(longest.args[1].get("max_gen_toks", _ANSWER_TOKENS))
        batch_tokens = batch_token_limit(answerer.model, answerer.device, answerer.plan.budget_bytes)
    else:
        batch_tokens = loss_batch_tokens(answerer.model)
    return max(1, min(_MAX_BATCH, batch_tokens // row_tokens))


def _compare(base: dict[str, Any], tuned: dict[str, Any]) -> list[TaskScore]:
    scores = []
    for task, values in tuned["results"].items():
        for name, value in values.items():
            metric, _, answer_filter = name.partition(",")  # lm-eval's key, such as "exact_match,strict-match"
            if not answer_filter or metric.endswith("_stderr") or _number(value) is None:
                continue
            base_values, tuned_values = (_row_values(results, task, metric, answer_filter) for results in (base, tuned))
            columns = [[by_row[row] for row in sorted(by_row)] for by_row in (base_values, tuned_values)]
            is_share = all(0 <= row_value <= 1 for column in columns for row_value in column)
            scores.append(TaskScore(
                task, metric if answer_filter == "none" else f"{metric} ({answer_filter})",
                len(tuned_values) or int(tuned.get("n-samples", {}).get(task, {}).get("effective", 0)),
                _number(base["results"].get(task, {}).get(name)), _number(value),
                tuned.get("higher_is_better", {}).get(task, {}).get(metric),
                difference(*columns, span=float(is_share)) if base_values.keys() == tuned_values.keys() else None,
            ))  # fmt: skip
    return scores


def _row_values(results: dict[str, Any], task: str, metric: str, answer_filter: str) -> dict[int, float]:
    samples = results.get("samples", {}).get(task, [])
    values = {sample["doc_id"]: _number(sample.get(metric)) for sample in samples if sample["filter"] == answer_filter}
    numbers = {row: value for row, value in values.items() if value is not None}
    return numbers if len(numbers) == len(values) else {}  # a metric without a number for some row has no difference


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
