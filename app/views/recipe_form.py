"""The form: one field for each recipe key, with type, choices and help from the schema."""

from __future__ import annotations

from typing import Any

import gradio as gr

from finetune.errors import RecipeError
from finetune.recipe import yaml as recipe_yaml
from finetune.settings.reference import Setting, settings_reference
from finetune.settings.schema import GROUPS

from ..planning.draft import Edited

#: A page must not allow a model's own code.
_LEFT_OUT = ("trust_remote_code",)


class Field:
    """One setting as a form component, and the conversion between text and value."""

    def __init__(self, row: Setting) -> None:
        self.name, self.row = row.name, row
        self.choices = [_shown(choice) for choice in row.choices]
        if row.type.endswith("| auto") and self.choices:
            self.choices.append("auto")

    @property
    def default(self) -> str:
        """The schema's default as it is shown; empty when there is none."""
        return "" if self.row.default in ("required", None, [], {}) else _shown(self.row.default)

    def component(self) -> Any:
        """A dropdown where the schema lists the choices, else a text field."""
        info = f"{self.row.description} Default: {self.default or 'none'}."
        identity = f"key-{self.name.replace('.', '-')}"
        if self.choices:
            choices = [*self.choices] if self.default in self.choices else ["", *self.choices]
            return gr.Dropdown(choices, label=self.name, info=info, elem_id=identity, value=self.default)
        return gr.Textbox(label=self.name, info=info, elem_id=identity, value=self.default, max_length=4000)

    def text(self, edited: Edited) -> str:
        """The draft's value, or the default, as it is shown."""
        values: Any = edited.values
        for part in self.name.split("."):
            values = values.get(part) if isinstance(values, dict) else None
        return self.default if values is None else _shown(values)

    def value(self, text: Any) -> Any:
        """Parse the typed text as a recipe does; None removes the setting, so that the default applies."""
        written = str(text).strip()
        if written in ("", self.default):
            return None
        value = recipe_yaml.parse_value(written)
        return str(written) if self.row.type.startswith("text") and not isinstance(value, (list, dict)) else value


def fields() -> list[Field]:
    """All settings in the schema's order."""
    return [Field(row) for row in settings_reference() if row.name not in _LEFT_OUT]


def build() -> list[tuple[Field, Any]]:
    """Lay out the fields in groups. Returns fields with their components."""
    components: list[tuple[Field, Any]] = []
    for title in GROUPS:
        members = [field for field in fields() if field.row.group == title]
        with gr.Accordion(title, open=False), gr.Row(elem_classes="ft-fields"):
            components += [(field, field.component()) for field in members]
    return components


def as_settings(field: Field, text: Any) -> dict[str, Any]:
    """A field's text as arguments of `Draft.change`. Raises RecipeError when it is no valid value."""
    try:
        return {field.name.replace(".", "__"): field.value(text)}
    except ValueError as error:
        raise RecipeError(f"{field.name}: {error}") from None


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, dict)):
        import json

        return json.dumps(value, ensure_ascii=False)
    return str(value)
