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
    #: A patch replaces it, an override defines it in a subclass, an attribute is set or read on objects.
    kind: Literal["patch", "override", "attribute", "private call"]
    reason: str
    #: The library's function that looks it up.
    used_by: str = ""
    #: Its parameters, without a `**` one.
    parameters: str | None = None
    #: Package or device without which no test can see the library use the name.
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
    """Set the dotted `name` until the process ends, or as a context."""
    owner, attribute = owner_of(name)
    restored = ExitStack()
    restored.callback(setattr, owner, attribute, getattr(owner, attribute))
    _set(owner, attribute, value)
    return restored


def wrap(name: str, around: Callable[..., Any]) -> ExitStack:
    """Replace a function by `around(function, ...)`, which takes the place of an earlier wrapper."""
    owner, attribute = owner_of(name)
    before = getattr(owner, attribute)
    usual = getattr(before, "usual", before)

    @functools.wraps(usual)
    def called(*inputs: Any, **named: Any) -> Any:
        return around(usual, *inputs, **named)

    called.usual = usual  # type: ignore[attr-defined]
    return replace(name, called)


def _set(owner: Any, attribute: str, value: Any) -> None:
    setattr(owner, attribute, value)
