"""Private names of libraries, and functions that patch them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True)
class PrivateName:
    """An undocumented name that a library looks up."""

    #: Module, class and attribute in which the library looks it up.
    name: str
    #: A patch replaces it, an override defines it in a subclass, an attribute is set or read on objects, a call uses it.
    kind: Literal["patch", "override", "attribute", "private call"]
    reason: str
    #: The library's function that looks it up.
    used_by: str = ""
    #: Parameter names of the function `name`, without `**kwargs`.
    parameters: str | None = None
    #: Package, device or state without which no test can see the library use the name.
    needs: str = ""


def owner_of(name: str) -> tuple[Any, str]:
    """Return the module or class of a dotted name, and the attribute. Raises ImportError, AttributeError."""
    *parts, attribute = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ".".join(parts[:end])
        try:
            owner: Any = import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise  # the module exists, but something that it imports does not
            continue
        for part in parts[end:]:
            owner = getattr(owner, part)
        return owner, attribute
    raise ModuleNotFoundError(f"no module of {name} is installed", name=parts[0])


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
