"""Settings during resolution, each with a one-line reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from finetune.settings import AUTO, Recipe, Settings, resolve

#: Reason of a setting that the recipe decides.
AS_SET = "as the recipe sets it"


@dataclass(frozen=True)
class Choices:
    """A recipe whose `auto` settings are filled in one by one. Immutable, so attempts can't mix."""

    recipe: Recipe
    values: Mapping[str, Any] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def is_set(self, name: str) -> bool:
        return getattr(self.recipe, name) != AUTO

    def value(self, name: str) -> Any:
        return getattr(self.recipe, name) if self.is_set(name) else self.values[name]

    def choose(self, name: str, value: Any, reason: str) -> Choices:
        """Resolve one setting, unless the recipe sets a value."""
        if self.is_set(name):
            return self.with_reason(name, AS_SET)
        return replace(self, values={**self.values, name: value}).with_reason(name, reason)

    def with_reason(self, name: str, reason: str) -> Choices:
        return replace(self, reasons={**self.reasons, name: reason})

    def open(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if not self.is_set(name)}

    def settings(self, **more: Any) -> Settings:
        """Fill in the choices. Raises ValueError for conflicting or missing values."""
        return resolve(self.recipe, **{**self.values, **more})
