"""Form with one field per recipe key, from the schema."""

from __future__ import annotations

from typing import Any

from finetune.errors import RecipeError
from finetune.recipe import yaml as recipe_yaml
from finetune.settings.reference import Setting, settings_reference
from finetune.settings.schema import GROUPS

from ..language import tr
from ..planning.draft import Edited, as_text
from .markup import render

#: A click must not allow a model's own code.
_LEFT_OUT = ("trust_remote_code",)


class Field:
    """One setting as a form field."""

    def __init__(self, row: Setting) -> None:
        self.name, self.row = row.name, row
        self.choices = [as_text(choice) for choice in row.choices]
        if row.type.endswith("| auto") and self.choices:
            self.choices.append("auto")
        if self.choices and self.default not in self.choices:
            self.choices.insert(0, "")

    @property
    def default(self) -> str:
        return "" if self.row.default in ("required", None, [], {}) else as_text(self.row.default)

    @property
    def identity(self) -> str:
        return f"key-{self.name.replace('.', '-')}"

    def help(self) -> str:
        is_list = not self.choices and self.row.type.startswith("list of ")
        kind = [tr("A list of {items}.", items=self.row.type.removeprefix("list of "))] if is_list else []
        usual = tr("Default: {value}.", value=self.default) if self.default else tr("Default: none.")
        return " ".join([tr(self.row.description), *kind, usual])

    def text(self, edited: Edited) -> str:
        values: Any = edited.values
        for part in self.name.split("."):
            values = values.get(part) if isinstance(values, dict) else None
        return self.default if values is None else as_text(values)

    def value(self, text: Any) -> Any:
        """Parse the typed text like a recipe; None restores the default."""
        written = str(text).strip()
        if written in ("", self.default):
            return None
        value = recipe_yaml.parse_value(written)
        # a text setting keeps `1` or `true` as text
        return str(written) if self.row.type.startswith("text") and not isinstance(value, (list, dict)) else value


def fields() -> list[Field]:
    """Return all settings in schema order."""
    return [Field(row) for row in settings_reference() if row.name not in _LEFT_OUT]


def form() -> str:
    """Return all fields in groups, with defaults."""
    groups = [(title, [field for field in fields() if field.row.group == title]) for title in GROUPS]
    return render("form", groups=groups)


def changed_values(edited: Edited) -> dict[str, str]:
    """Return the texts of fields that differ from their default."""
    # the form itself has only defaults, and the browser fills these in
    return {field.name: text for field in fields() if (text := field.text(edited)) != field.default}


def as_settings(field: Field, text: Any) -> dict[str, Any]:
    """Return a field's text as arguments of `Draft.change`. Raises RecipeError."""
    try:
        return {field.name.replace(".", "__"): field.value(text)}
    except ValueError as error:
        raise RecipeError(f"{field.name}: {error}") from None
