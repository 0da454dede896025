"""Outside finetune/compat no library is patched; private names exist that are imported, or read from what is imported."""

import ast
import importlib
import pkgutil
import sys
from pathlib import Path

import pytest
from patched_names import OVERRIDDEN
from used_names import used_in

ROOT = Path(__file__).resolve().parents[2]
FILES = [path for part in ("finetune", "app") for path in sorted((ROOT / part).rglob("*.py"))]
OURS = {"finetune", "app", "__future__"}
OVERRIDES = {name.rpartition(".")[2] for name in OVERRIDDEN}


def is_foreign(module: str | None) -> bool:
    return bool(module) and module.partition(".")[0] not in OURS | sys.stdlib_module_names


def imports(tree: ast.AST) -> dict[str, str]:
    """Local name -> what it is, for everything imported."""
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return imported


def root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def patches(tree: ast.AST) -> list[str]:
    """Assignments to attributes of what was imported from a library, in any form."""
    imported, assignments = imports(tree), []
    for node in ast.walk(tree):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del))
        called = isinstance(node, ast.Call) and root(node.func) in ("setattr", "delattr")
        if stored or called:
            target = node if stored else node.args[0]
            through_modules = ast.unparse(target).startswith("sys.modules")
            if through_modules or is_foreign(imported.get(root(target))):
                assignments.append(f"{node.lineno}: {ast.unparse(node)}")
    return assignments


def require_private_names(source: str) -> None:
    """Look up the private names of libraries that are imported, or read from what is imported."""
    for name in used_in(source):
        is_made_later = name.startswith("torch._inductor.virtualized.V.")  # while the compiler runs
        if any(map(is_private, name.split("."))) and not is_made_later:
            pkgutil.resolve_name(name)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_leaves_the_libraries_alone(path):
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    if path.parent.name != "compat":
        assert patches(tree) == []
        assert "finetune.compat" not in {name.rpartition(".")[0] for name in imports(tree).values()}
    require_private_names(source)


def classes_with_foreign_bases():
    """Module, name and private methods of each class that inherits from a library's."""
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported, module = imports(tree), ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and any(is_foreign(imported.get(root(base))) for base in node.bases):
                methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef) and is_private(part.name)}
                yield module, node.name, methods


def test_a_class_overrides_only_what_is_listed():
    for module, name, methods in classes_with_foreign_bases():
        own = getattr(importlib.import_module(module), name)
        theirs = {attribute for base in own.__mro__[1:] if is_foreign(base.__module__) for attribute in vars(base)}
        assert methods & theirs <= OVERRIDES, f"{module}.{name}"


@pytest.mark.parametrize(
    "code",
    [
        "import trl\ntrl.trainer.utils._use_triton = None",
        "from transformers import trainer\ntrainer.update_fsdp_plugin_peft: object = None",
        "import torch as t\nsetattr(t, 'compile', None)",
        "from peft.tuners.lora import dora\ndel dora.deepcopy",
        "import sys\nsys.modules['datasets'].config.HF_HUB_OFFLINE = True",
        "def inside():\n    import bitsandbytes\n    bitsandbytes.matmul, x = None, 1",
    ],
)
def test_a_patch_would_be_seen(code):
    assert patches(ast.parse(code))


@pytest.mark.parametrize("code", ["from torch._C import x", "import torch\ntorch._C._foo()", "from torch.nn import _foo"])
def test_a_private_name_that_is_gone_would_be_seen(code):
    with pytest.raises((AttributeError, ImportError)):
        require_private_names(code)
