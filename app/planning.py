"""Planner process, without a GPU: `python -m app.planning`"""

from __future__ import annotations

import functools
import itertools
import json
from typing import TYPE_CHECKING, Any

from finetune.card.visible import hide_gpus
from finetune.errors import DataError, FinetuneError
from finetune.planner.plan import Verdict
from finetune.recipe import parse_recipe
from finetune.settings import DatasetRecipe, Recipe
from finetune.settings.schema import Decides, settings_that_decide

from .worker import Report, Work, serve

if TYPE_CHECKING:
    from finetune.data.preparation import EncodedRows
    from finetune.data.readers import Row
    from finetune.planner.planning import RowsRead

#: Encoded datasets to keep in memory, and row lengths to send for a histogram.
_MOST_DATASETS, _MOST_LENGTHS = 2, 20_000
_ROWS_READ, _ROWS_SHOWN, _CELL_CHARACTERS = 20, 5, 160  # of the first rows; the roles of columns are guessed by `_ROWS_READ`
_APPLIED_AFTER_TOKENISING = ("max_length", "excess_length")


class Questions:
    """Methods that the page calls: plans and data of a recipe."""

    def __init__(self) -> None:
        # by settings that decide the tokens, last used last
        self._encoded: dict[str, EncodedRows] = {}

    def look(self, work: Work, recipe: str) -> dict[str, Any]:
        """Return data counts, problems, row lengths and the first row."""
        parsed = _completed_recipe(recipe)
        selected = self._encode_rows(parsed, work.report).select(parsed, None)
        lengths = sorted(selected.lengths)
        if len(lengths) > _MOST_LENGTHS:  # every nth length, and the longest
            lengths = lengths[:: len(lengths) // _MOST_LENGTHS + 1] + lengths[-1:]
        return {
            "report": selected.report.as_json(),
            "kinds": [row.kind for row in selected.report.rows_refused],
            "eval_report": selected.eval_report.as_json() if selected.eval_report else None,
            "lengths": lengths,
            **self.row(work, recipe, 0),
        }

    def row(self, work: Work, recipe: str, index: int) -> dict[str, Any]:
        """Return a sequence as (text, is trained) pieces."""
        from finetune.data.pictures.source import thumbnails
        from finetune.data.tokens import NOT_TRAINED, decode_spans, shorten_repeats

        parsed = _completed_recipe(recipe)
        encoded = self._encode_rows(parsed, work.report)
        selected = encoded.select(parsed, None)
        row_count = len(selected.lengths)
        index = max(0, min(index, row_count - 1))
        ids, labels, pictures = selected.sequence(index)
        spans = decode_spans(ids, labels, encoded.encoder.tokenizer)
        return {
            "marked": [[shorten_repeats(text), bool(trained)] for text, trained in spans],
            "index": index, "sequences": row_count,
            "tokens": len(ids), "trained_tokens": sum(label != NOT_TRAINED for label in labels),
            "pictures": thumbnails(pictures),
        }  # fmt: skip

    def columns(self, _work: Work, recipe: str) -> dict[str, Any]:
        """Return the first rows and each column's role."""
        from finetune.data.readers import Row
        from finetune.data.sources import find_sources

        dataset = parse_recipe(recipe, "recipe").dataset
        read_rows = (row for source in find_sources(dataset.path, dataset) for row in source.rows() if isinstance(row, Row))
        rows = list(itertools.islice(read_rows, _ROWS_READ))
        names = list(dict.fromkeys(name for row in rows for name in row.values))
        shown_rows = [{name: str(value)[:_CELL_CHARACTERS] for name, value in row.values.items()} for row in rows[:_ROWS_SHOWN]]
        roles, is_guess = _roles_of(names, rows, dataset)
        return {"columns": names, "rows": shown_rows, "roles": roles, "is_guess": is_guess}

    def plan(self, work: Work, recipe: str, compare: bool = False, has_data: bool = True) -> dict[str, Any]:
        """Return the plan as JSON, with its alternatives if `compare`."""
        from finetune.card import find_card
        from finetune.planner.planning import plan_recipe, without_rows

        parsed = parse_recipe(recipe, "recipe")
        card = find_card(parsed.gpu, processes=parsed.launch.processes_here)
        # without data: for rows of `max_length` tokens
        rows = functools.partial(self._read_rows, report=work.report) if has_data else without_rows
        return plan_recipe(parsed, card, rows, progress=work.report, compare=compare).as_json()

    def model_verdict(self, work: Work, recipe: str, model: str) -> dict[str, Any]:
        """Return whether `model` fits with full rows, its peak memory and speed."""
        from finetune.card import find_card
        from finetune.model.configuration import read_config
        from finetune.planner.planning import plan_recipe, without_rows
        from finetune.planner.shape import shape_of

        parsed = parse_recipe(recipe, "recipe")
        # the planner chooses the remaining settings for this model
        inherited: dict[str, Any] = {name: getattr(parsed, name) for name in ("dataset", "gpu", "max_length")}
        try:
            candidate = Recipe(**inherited, model_name_or_path=model)
            plan = plan_recipe(candidate, find_card(parsed.gpu), without_rows, progress=work.report)
            parameters = shape_of(read_config(plan.settings), plan.settings).parameters
        except FinetuneError as error:
            return {"verdict": Verdict.UNKNOWN, "because": error.problems[0]}
        forecast, base_format = plan.forecast, plan.settings.base_format
        return {
            "verdict": plan.verdict, "parameters": parameters, "bits": base_format.bits if base_format.setting else None,
            "peak_bytes": forecast and forecast.peak_bytes, "tokens_per_s": forecast and forecast.tokens_per_s,
        }  # fmt: skip

    def _read_rows(self, recipe: Recipe, report: Report) -> RowsRead:
        from finetune.planner.planning import read_rows

        # rows of a hub dataset are read only if that needs no download
        is_encoded = _data_key(recipe) in self._encoded
        return read_rows(recipe, functools.partial(self._encode_rows, report=report), downloaded=is_encoded)

    def _encode_rows(self, recipe: Recipe, report: Report) -> EncodedRows:
        from finetune.planner.planning import encode_rows

        key = _data_key(recipe)
        rows = self._encoded.pop(key) if key in self._encoded else encode_rows(recipe, report)
        self._encoded[key] = rows  # at the end: the first was used longest ago
        if len(self._encoded) > _MOST_DATASETS:
            del self._encoded[next(iter(self._encoded))]
        return rows


def _roles_of(names: list[str], rows: list[Row], dataset: DatasetRecipe) -> tuple[dict[str, str], bool]:
    # the alpaca field of each column, or `ignore`, and whether these are guesses
    from finetune.data.formats import FORMATS
    from finetune.data.row_parser import choose_parser, suggested_columns

    values = [row.values for row in rows]
    # nested values are conversations, which have no alpaca fields
    if any(not isinstance(value, str | int | float | None) for row in values for value in row.values()):
        return {}, False
    try:
        parser = choose_parser("", values, dataset)
    except DataError:
        columns, is_guess = dataset.columns or suggested_columns(values), True
    else:
        if parser.format != "alpaca":
            return {}, False
        columns = {name: name for name in names if name in FORMATS["alpaca"].columns} | parser.columns
        is_guess = bool(parser.parse([*rows]).unused.blocking())
    role_of_column = {column: role for role, column in columns.items()}
    return {name: role_of_column.get(name, "ignore") for name in names}, is_guess and not dataset.columns


@functools.lru_cache(maxsize=1)  # completing may read the rows' file
def _completed_recipe(text: str) -> Recipe:
    from finetune.recipe.complete import complete

    return complete(parse_recipe(text, "recipe"))[0]


def _data_key(recipe: Recipe) -> str:
    # settings that decide the tokens of the rows before long rows are cut or dropped
    chosen = recipe.model_dump(mode="json")
    return json.dumps([chosen[name] for name in settings_that_decide(Decides.TOKENS) if name not in _APPLIED_AFTER_TOKENISING])


if __name__ == "__main__":
    hide_gpus()
    serve(Questions())
