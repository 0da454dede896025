"""All patches of other libraries, one module per library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from pkgutil import resolve_name
from typing import Any

# `tests/compat` fails when a library has renamed a patched name or no longer calls it. The modules' functions import their
# library when called.


def owner_of(name: str) -> tuple[Any, str]:
    """Return the module or class of a dotted name, and the attribute. Raises ImportError, AttributeError."""
    path, _, attribute = name.rpartition(".")
    return resolve_name(path), attribute


def replace(name: str, value: Any) -> ExitStack:
    """Set the dotted `name` until the process ends, or in a `with` block."""
    owner, attribute = owner_of(name)
    restore = ExitStack()
    restore.callback(setattr, owner, attribute, getattr(owner, attribute))
    _set(owner, attribute, value)
    return restore


def wrap(name: str, around: Callable[..., Any]) -> ExitStack:
    """Replace a function by `around(function, ...)`, also in place of an earlier wrapper."""
    owner, attribute = owner_of(name)
    current = getattr(owner, attribute)
    original = getattr(current, "original_function", current)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapper.original_function = original  # type: ignore[attr-defined]
    return replace(name, wrapper)


# tests/compat replaces this function to see every patch
def _set(owner: Any, attribute: str, value: Any) -> None:
    setattr(owner, attribute, value)
