"""Planner process, without a GPU: `python -m app.planning.process`"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from finetune.card.visible import hide_gpus
from finetune.errors import FinetuneError
from finetune.planner.plan import Verdict
from finetune.recipe import parse_recipe
from finetune.settings import Recipe
from finetune.settings.base_formats import base_format_of
from finetune.settings.schema import Decides, settings_that_decide

from ..worker import Report, Work, serve

if TYPE_CHECKING:
    from finetune.data.preparation import EncodedRows, SelectedRows
    from finetune.planner.planning import RowsRead

_DATASETS, _LENGTHS_SENT = 2, 20_000
#: Number of first rows shown, and characters of a cell.
_ROWS_SHOWN, _CELL_CHARACTERS = 5, 160
#: Settings applied after tokenising.
_APPLIED_AFTERWARDS = ("max_length", "excess_length")


class Questions:
    """Answers about a recipe text."""

    def __init__(self) -> None:
        # data of the last few recipes stays in memory
        self._encoded: dict[str, EncodedRows] = {}

    def look(self, work: Work, recipe: str) -> dict[str, Any]:
        prepared = self._prepared(_completed(recipe), work.report)
        lengths = sorted(prepared.lengths)
        # a histogram needs no more than a sample, and the longest row
        sent = lengths if len(lengths) <= _LENGTHS_SENT else lengths[:: len(lengths) // _LENGTHS_SENT + 1] + lengths[-1:]
        return {
            "report": prepared.report.as_json(),
            # refused rows are listed here; a run refuses them
            "kinds": [row.kind for row in prepared.report.rows_refused],
            "eval_report": prepared.eval_report.as_json() if prepared.eval_report else None,
            "lengths": sent,
            **self.row(work, recipe, 0),
        }

    def row(self, work: Work, recipe: str, index: int) -> dict[str, Any]:
        from finetune.data.pictures.source import thumbnails
        from finetune.data.tokens import NOT_TRAINED, decode_spans, shorten_repeats

        parsed = _completed(recipe)
        prepared = self._prepared(parsed, work.report)
        count = len(prepared.lengths)
        index = max(0, min(index, count - 1))
        ids, labels, pictures = prepared.sequence(index)
        spans = decode_spans(ids, labels, self._encode(parsed, work.report).encoder.tokenizer)
        return {
            "marked": [[shorten_repeats(text), bool(trained)] for text, trained in spans], "index": index, "sequences": count,
            "tokens": len(ids), "trained_tokens": sum(label != NOT_TRAINED for label in labels),
            "pictures": thumbnails(pictures),
        }  # fmt: skip

    def columns(self, _work: Work, recipe: str) -> dict[str, Any]:
        from finetune.data.column_advice import first_rows, roles_of

        dataset = parse_recipe(recipe, "recipe").dataset
        rows = first_rows(dataset)
        names = list(dict.fromkeys(name for row in rows for name in row.values))
        shown = [{name: str(value)[:_CELL_CHARACTERS] for name, value in row.values.items()} for row in rows[:_ROWS_SHOWN]]
        roles, is_guess = roles_of(rows, dataset)
        return {"columns": names, "rows": shown, "roles": roles, "is_guess": is_guess}

    def plan(self, work: Work, recipe: str, compare: bool = False, has_data: bool = True) -> dict[str, Any]:
        from finetune.card import find_card
        from finetune.planner.planning import plan_recipe, without_rows

        parsed = parse_recipe(recipe, "recipe")
        card = find_card(parsed.gpu, processes=parsed.launch.processes_here)
        # without data the plan is for full rows
        rows = functools.partial(self._rows, report=work.report) if has_data else without_rows
        return plan_recipe(parsed, card, rows, progress=work.report, compare=compare).as_json()

    def badge(self, work: Work, recipe: str, model: str) -> dict[str, Any]:
        from finetune.card import find_card
        from finetune.model.configuration import read_config
        from finetune.planner.planning import plan_recipe, without_rows
        from finetune.planner.shape import shape_of

        parsed = parse_recipe(recipe, "recipe")
        # other settings are the planner's
        inherited: dict[str, Any] = {name: getattr(parsed, name) for name in ("dataset", "gpu", "max_length")}
        try:
            plan = plan_recipe(
                Recipe(**inherited, model_name_or_path=model), find_card(parsed.gpu), without_rows, progress=work.report
            )
            parameters = shape_of(read_config(plan.settings), plan.settings).parameters
        except FinetuneError as error:
            return {"verdict": Verdict.UNKNOWN, "because": error.problems[0]}
        forecast, base = plan.forecast, base_format_of(plan.settings)
        return {
            "verdict": plan.verdict, "parameters": parameters, "bits": base.bits if base.setting else None,
            "peak_bytes": forecast and forecast.peak_bytes, "tokens_per_s": forecast and forecast.tokens_per_s,
        }  # fmt: skip

    def _prepared(self, recipe: Recipe, report: Report) -> SelectedRows:
        return self._encode(recipe, report).select(recipe, None)

    def _rows(self, recipe: Recipe, report: Report) -> RowsRead:
        from finetune.planner.planning import read_rows

        is_downloaded = _data_key(recipe) in self._encoded
        return read_rows(recipe, functools.partial(self._encode, report=report), downloaded=is_downloaded)

    def _encode(self, recipe: Recipe, report: Report) -> EncodedRows:
        from finetune.planner.planning import encode_rows

        key = _data_key(recipe)
        rows = self._encoded.pop(key) if key in self._encoded else encode_rows(recipe, report)
        self._encoded[key] = rows  # the newest last: the first leaves
        if len(self._encoded) > _DATASETS:
            del self._encoded[next(iter(self._encoded))]
        return rows


@functools.lru_cache(maxsize=1)  # completing may read the rows' file
def _completed(text: str) -> Recipe:
    from finetune.recipe.complete import complete

    return complete(parse_recipe(text, "recipe"))[0]


def _data_key(recipe: Recipe) -> str:
    # everything that decides the rows' tokens, before the limit of length
    chosen = recipe.model_dump(mode="json")
    return json.dumps([chosen[name] for name in settings_that_decide(Decides.TOKENS) if name not in _APPLIED_AFTERWARDS])


def main() -> None:
    """Run the planner process."""
    hide_gpus()
    serve(Questions())


if __name__ == "__main__":
    main()
