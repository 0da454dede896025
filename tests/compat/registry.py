"""The registry's rows, and a check of a row against the installed libraries."""

import importlib
import inspect
import pkgutil
from types import CodeType

import finetune.compat
from finetune.compat.patch_registry import PrivateName, owner_of

MODULES = [name for _, name, _ in pkgutil.iter_modules(finetune.compat.__path__) if name != "patch_registry"]
ROWS: list[PrivateName] = [row for name in MODULES for row in importlib.import_module(f"finetune.compat.{name}").PRIVATE_NAMES]


def problem(row: PrivateName) -> str:
    """What is wrong with a row; empty when the library has the name, with its parameters, and looks it up."""
    try:
        owner, attribute = owner_of(row.name)
    except (ImportError, AttributeError) as error:
        return f"{row.name}: {error}"
    if row.kind != "attribute" and not hasattr(owner, attribute):
        return f"{row.name} is gone"
    if row.parameters is not None:
        own = inspect.signature(getattr(owner, attribute)).parameters.values()
        parameters = " ".join(parameter.name for parameter in own if parameter.kind is not parameter.VAR_KEYWORD)
        if parameters != row.parameters:
            return f"{row.name} takes {parameters}, not {row.parameters}"
    if not row.used_by or attribute in names_in(function(row.used_by).__code__):
        return ""
    return f"{row.used_by} does not look {attribute} up"


def function(name: str):
    """The plain function of a dotted name, unwrapped from decorators and class methods."""
    owner, attribute = owner_of(name)
    attribute_value = inspect.getattr_static(owner, attribute)
    return inspect.unwrap(getattr(attribute_value, "__func__", attribute_value))


def names_in(code: CodeType) -> set[str]:
    """All names that a function and its inner functions look up."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}  # `"_parameters" in self.__dict__`
    return {*code.co_names, *code.co_freevars, *texts}.union(*inner)
