"""Private names of libraries, and functions that patch them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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


@contextmanager
def replaced(name: str, value: Any) -> Iterator[None]:
    """Temporarily set the dotted `name`."""
    owner, attribute = owner_of(name)
    before = getattr(owner, attribute)
    _set(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, before)


def replace(name: str, value: Any) -> None:
    """Set the dotted `name` until the process ends."""
    _set(*owner_of(name), value)


def wrapped(name: str, around: Callable[..., Any]) -> AbstractContextManager[None]:
    """Temporarily wrap a function as `around(function, ...)`."""
    owner, attribute = owner_of(name)
    return replaced(name, _around(getattr(owner, attribute), around))


def wrap(name: str, around: Callable[..., Any]) -> Any:
    """Wrap a function until the process ends, and return the original."""
    owner, attribute = owner_of(name)
    before = getattr(owner, attribute)
    # a later call replaces an earlier wrapper
    usual = getattr(before, "usual", before)
    _set(owner, attribute, _around(usual, around))
    return usual


def _around(usual: Any, around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(usual)
    def called(*inputs: Any, **named: Any) -> Any:
        return around(usual, *inputs, **named)

    called.usual = usual  # type: ignore[attr-defined]
    return called


def _set(owner: Any, attribute: str, value: Any) -> None:
    setattr(owner, attribute, value)
