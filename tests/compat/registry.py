"""The registry's rows, and a check of a row against the installed libraries."""

import contextlib
import importlib
import inspect
import pkgutil
from types import CodeType

import finetune.compat
from finetune.compat.touched import Touched, owner_of

MODULES = [name for _, name, _ in pkgutil.iter_modules(finetune.compat.__path__) if name != "touched"]
ROWS: list[Touched] = [row for name in MODULES for row in importlib.import_module(f"finetune.compat.{name}").TOUCHED]


def problem(row: Touched) -> str:
    """What is wrong with a row; empty when the library has the name, with its parameters, and looks it up."""
    try:
        owner, attribute = owner_of(row.name)
    except (ImportError, AttributeError) as error:
        return f"{row.name}: {error}"
    if row.kind != "attribute" and not hasattr(owner, attribute):
        return f"{row.name} is gone"
    if row.parameters is not None:
        found = " ".join(inspect.signature(getattr(owner, attribute)).parameters)
        if found != row.parameters:
            return f"{row.name} takes {found}, not {row.parameters}"
    if not row.used_by or any(attribute in names_in(user.__code__) for user in users(row)):
        return ""
    return f"{row.used_by} does not look {attribute} up"


def users(row: Touched) -> list:
    """The existing functions of the library that look the name up."""
    found = []
    for name in row.used_by.split("|"):
        with contextlib.suppress(ImportError, AttributeError):
            found.append(function(name))
    return [user for user in found if hasattr(user, "__code__")]


def function(name: str):
    """The plain function of a dotted name, unwrapped from decorators and class methods."""
    owner, attribute = owner_of(name)
    found = inspect.getattr_static(owner, attribute)
    return inspect.unwrap(getattr(found, "__func__", found))


def names_in(code: CodeType) -> set[str]:
    """All names that a function and its inner functions look up."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}  # `"_parameters" in self.__dict__`
    return {*code.co_names, *code.co_freevars, *texts}.union(*inner)
