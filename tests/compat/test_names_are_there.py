"""Each name in the registry exists in the installed library and is looked up there."""

import pytest
from registry import ROWS, function, problem

from finetune.compat.patch_registry import owner_of

#: Of a class that is written in C (Py_TPFLAGS_IMMUTABLETYPE).
IMMUTABLE = 1 << 8
USED = [row for row in ROWS if row.used_by]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_library_has_the_name_and_looks_it_up(row):
    assert problem(row) == ""


def renamed(code, name):
    """The code with another name in place of `name`, also in the functions inside it."""
    constants = tuple(
        renamed(value, name) if hasattr(value, "co_names") else f"{name}_other" if value == name else value
        for value in code.co_consts
    )
    names = tuple(f"{name}_other" if value == name else value for value in code.co_names)
    return code.replace(co_names=names, co_consts=constants)


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind != "attribute"], ids=lambda row: row.name)
def test_a_removed_name_is_detected(row, monkeypatch):
    owner, attribute = owner_of(row.name)
    for home in [base for base in getattr(owner, "__mro__", [owner]) if attribute in vars(base)]:
        made_when_looked_up = row.name.startswith("torch.ops.")
        if not made_when_looked_up and (not isinstance(home, type) or not home.__flags__ & IMMUTABLE):
            monkeypatch.delattr(home, attribute)
        else:
            monkeypatch.setattr("registry.owner_of", lambda name: (type("Without", (), {}), name.rpartition(".")[2]))
    assert problem(row)


@pytest.mark.parametrize("row", USED, ids=lambda row: row.name)
def test_a_name_that_is_no_longer_looked_up_is_detected(row, monkeypatch):
    user = function(row.used_by)
    monkeypatch.setattr(user, "__code__", renamed(user.__code__, row.name.rpartition(".")[2]))
    assert "does not look" in problem(row)


@pytest.mark.parametrize("row", [row for row in ROWS if row.parameters], ids=lambda row: row.name)
def test_another_parameter_is_detected(row, monkeypatch):
    owner, attribute = owner_of(row.name)
    monkeypatch.setattr(owner, attribute, lambda another: None)
    assert "takes another" in problem(row)
