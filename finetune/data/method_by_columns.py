"""Which training method the rows of a dataset are for, by the columns of the first ones."""

from __future__ import annotations

import itertools

from finetune.data.examples import sources_of
from finetune.data.formats import FORMATS, LABELLED_ANSWERS, filled, rename_columns
from finetune.data.readers import Row
from finetune.data.sources import is_local
from finetune.settings import DatasetRecipe
from finetune.settings.methods import METHODS

_FIRST_ROWS = 100
#: Values of a label that marks an answer good or bad; others are classes.
_MARKS = (True, False, "true", "false", "True", "False")


def method_of_rows(dataset: DatasetRecipe) -> tuple[str, str]:
    """The method, and why; sft for a dataset that is not on this machine. Raises DataError and RecipeError."""
    for name, method in METHODS.items():
        if method.has_own_format and dataset.format == method.row_format:
            return name, f"dataset.format is {dataset.format}"
    paths = [dataset.path] if isinstance(dataset.path, str) else dataset.path
    if not all(map(is_local, paths)):
        return "sft", "the rows are not on this machine"
    rows = [row.values for row in itertools.islice(sources_of(dataset)[0][0].rows(), _FIRST_ROWS) if isinstance(row, Row)]
    renamed = [rename_columns(values, dataset.columns) for values in rows]
    filled_columns = filled(renamed)
    if filled_columns.issuperset(FORMATS["preference"].required):
        return "dpo", "the rows have a chosen and a rejected answer"
    has_answers = any(filled_columns.issuperset(FORMATS[name].required) for name in LABELLED_ANSWERS)
    for column in ("label", "kto_tag") if has_answers else ():
        if column in filled_columns and all(values.get(column) in _MARKS for values in renamed):
            return "kto", f"the answers are marked good or bad ({column})"
    return "sft", "the rows have one answer each"
