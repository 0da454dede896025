"""The planner, a process of its own: reads questions as lines of JSON, answers with lines of JSON.

look    {"recipe": yaml}                                  what is in the data: report, lengths, examples, one example marked
plan    {"recipe": yaml, "free_bytes": n or null,         the plan with its forecast, for the data as it was read;
         "compare": bool}                                 with forecasts of what is next to it
badges  {"recipe": yaml, "models": [id, ...]}             whether each of these models fits with this recipe
"""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from app.planning.ahead import Ahead
from app.process import claim_stdout
from finetune.errors import FinetuneError
from finetune.garbage import collect_rarely
from finetune.recipe import AUTO, Recipe, parse_recipe, resolved

if TYPE_CHECKING:
    from finetune.plan.plan import Plan

_DATASETS, _LENGTHS_SENT, _EXAMPLES = 3, 20_000, 5


class Questions:
    """Answers, with the data of the last few recipes in memory."""

    def __init__(self) -> None:
        self._looked: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """One answer. FinetuneErrors are answers, too."""
        try:
            recipe = parse_recipe(question["recipe"], "recipe")
            kind = question["kind"]
            if kind == "look":
                return {key: value for key, value in self._look(recipe).items() if key != "statistics"}
            if kind == "plan":
                return self._plan(recipe, question.get("free_bytes"), question.get("compare", False))
            return {"badges": {name: self._badge(recipe, name) for name in question["models"]}}
        except FinetuneError as error:
            return {**error.as_json(), "title": error.title}
        except Exception as error:  # noqa: BLE001 - the page says what it was, and the next question gets its answer
            import traceback

            traceback.print_exc()
            return {"title": "Internal error", "problems": [f"{type(error).__name__}: {error}"], "fix": ""}

    def _look(self, recipe: Recipe) -> dict[str, Any]:
        key = _data_key(recipe)
        if key not in self._looked:
            self._looked[key] = _read(recipe)
            while len(self._looked) > _DATASETS:
                self._looked.popitem(last=False)
        self._looked.move_to_end(key)
        return self._looked[key]

    def _plan(self, recipe: Recipe, free_bytes: int | None, compare: bool) -> dict[str, Any]:
        plan, why = self._made(recipe, free_bytes, None, compare)
        return {"plan": plan.as_json(), "without_data_because": why}

    def plan(self, recipe: Recipe, progress: Callable[[str], None]) -> Plan:
        """A plan that nobody has asked for yet. `progress` may raise to end it."""
        return self._made(recipe, None, progress)[0]

    def _made(
        self, recipe: Recipe, free_bytes: int | None, progress: Callable[[str], None] | None, compare: bool = False
    ) -> tuple[Plan, str | None]:
        from finetune.card import find_card
        from finetune.plan import make_plan

        card = find_card(recipe.gpu, free_bytes=free_bytes)
        data, why = None, None
        try:
            data = _limited(self._look(recipe)["statistics"], recipe)
        except FinetuneError as error:
            why = " ".join(error.problems[:3])
        return make_plan(recipe, card, data, progress=progress, compare=compare), why

    def _badge(self, recipe: Recipe, name: str) -> dict[str, Any]:
        """Verdict for this model in place of the recipe's, with its own settings left to the planner; and its size."""
        from finetune.card import find_card
        from finetune.model.configuration import read_config
        from finetune.plan import make_plan
        from finetune.plan.shape import shape_of

        kept: dict[str, Any] = {
            "dataset": recipe.dataset,
            "gpu": recipe.gpu,
            "max_length": recipe.max_length,
            "model_name_or_path": name,
        }
        try:
            plan = make_plan(Recipe(**kept), find_card(recipe.gpu), None)
            parameters = shape_of(read_config(plan.settings), plan.settings).parameters
        except FinetuneError as error:
            return {"verdict": "unknown", "because": error.problems[0]}
        peak, four_bit = plan.forecast.peak_bytes if plan.forecast else None, plan.settings.load_in_4bit
        return {"verdict": plan.verdict, "peak_bytes": peak, "load_in_4bit": four_bit, "parameters": parameters}


def _data_key(recipe: Recipe) -> str:
    """What the rows' tokens depend on; the limit of length is applied afterwards."""
    names = ("model_name_or_path", "model_revision", "train_on_inputs", "chat_template", "seed")
    return json.dumps([recipe.dataset.model_dump(mode="json"), *(getattr(recipe, name) for name in names)])


def _read(recipe: Recipe) -> dict[str, Any]:
    """Read and tokenise. Rows that can't be trained on are shown, not raised; the start still refuses them."""
    from finetune import data
    from finetune.run.prepare import statistics_of

    lenient = resolved(recipe, max_length=AUTO, dataset=recipe.dataset.model_copy(update={"on_bad_rows": "skip"}))
    tokenizer = data.load_tokenizer(lenient)
    prepared = data.prepare(lenient, tokenizer, max_length=None)
    lengths = sorted(prepared.lengths)
    sent = lengths if len(lengths) <= _LENGTHS_SENT else lengths[:: len(lengths) // _LENGTHS_SENT + 1] + lengths[-1:]
    return {
        "report": prepared.report.as_json(),
        "eval_report": prepared.eval_report.as_json() if prepared.eval_report else None,
        "lengths": sent,
        "marked": [[text, bool(trained)] for text, trained in data.mark_example(prepared, tokenizer)],
        "conversations": _conversations(recipe),
        "statistics": statistics_of(prepared),
    }


def _conversations(recipe: Recipe) -> list[list[dict[str, str]]]:
    """The first rows as messages: role and text."""
    from finetune.data.examples import read_examples

    found = []
    for example in read_examples(recipe.dataset, recipe.seed).train.examples[:_EXAMPLES]:
        messages = getattr(example, "messages", None) or [{"role": "text", "content": getattr(example, "text", None) or ""}]
        found.append([{"role": str(message["role"]), "text": str(message.get("content") or "")[:4000]} for message in messages])
    return found


def _limited(statistics: Any, recipe: Recipe) -> Any:
    """The statistics with the recipe's limit of length: what is over it is cut or left out, as `excess_length` says."""
    import dataclasses

    limit = recipe.max_length
    if limit == AUTO or not statistics.lengths or statistics.lengths[-1] <= limit:
        return statistics
    if recipe.excess_length == "truncate":
        lengths = tuple(min(length, limit) for length in statistics.lengths)
    else:
        lengths = tuple(length for length in statistics.lengths if length <= limit)
    tokens = sum(lengths)
    trained = round(statistics.trained_tokens * tokens / max(1, statistics.total_tokens))
    return dataclasses.replace(statistics, rows=len(lengths), lengths=lengths, total_tokens=tokens, trained_tokens=trained)


def main() -> int:
    """Answer until standard input closes, which is when the app ends; plan ahead of the next question."""
    collect_rarely()
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork of a process with a team of OpenMP threads waits for them for ever
    out = claim_stdout()
    questions = Questions()
    ahead = Ahead(questions.plan, leave=(0, out.fileno()))
    for line in sys.stdin:
        ahead.end()
        question = json.loads(line)
        answer = questions.answer(question)
        out.write(json.dumps(answer, default=str) + "\n")
        out.flush()
        if "plan" in answer:
            ahead.start_from(parse_recipe(question["recipe"], "recipe"), Recipe.model_validate(answer["plan"]["plan"]))
    ahead.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
