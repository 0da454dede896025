"""What tests, benchmarks and scripts import from this project, or read of its modules, is there, also where it seldom runs."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = ("finetune", "app", "benchmarks", "tests", "standin_gpu")


def module_path(module):
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@cache
def names_of(path):
    """Names bound at any depth outside functions and classes; a module with `__getattr__` or `import *` has every name."""
    names, nodes = set(), [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        for node in ast.iter_child_nodes(nodes.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            else:
                names |= {node.id} if isinstance(node, ast.Name) else set()
                nodes.append(node)
    return names


def has_name(module, name):
    path = module_path(module)
    return path is None or {name, "__getattr__", "*"} & names_of(path) or module_path(f"{module}.{name}") is not None


def missing_names(path):
    tree, modules = ast.parse(path.read_text(encoding="utf-8")), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in OURS:
            for alias in node.names:
                if not has_name(node.module, alias.name):
                    yield f"{path.relative_to(ROOT)}:{node.lineno} {node.module}.{alias.name}"
                elif module_path(f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            module = modules[node.value.id]
            if not node.attr.startswith("__") and not has_name(module, node.attr):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {module}.{node.attr}"


def test_names_that_are_imported_exist():
    paths = [path for folder in (*OURS, "scripts", "docs") for path in (ROOT / folder).rglob("*.py")]
    assert [missing for path in sorted(paths) for missing in missing_names(path)] == []
