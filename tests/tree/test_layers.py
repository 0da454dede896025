"""Nothing lower in the tree imports anything higher, also not inside a function, and no chain of imports is long."""

import ast
import functools
import re
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: From the lowest to the highest; a package may import itself and what stands before it.
LAYERS = (
    "finetune.errors", "finetune.units", "finetune.system", "finetune.files",
    "finetune.compat", "finetune.hub", "finetune.requirements",
    "finetune.events", "finetune.settings", "finetune.layers", "finetune.bundled", "finetune.card", "finetune.data",
    "finetune.model", "finetune.methods", "finetune.memory", "finetune.recipe", "finetune.planner", "finetune.api",
    "finetune.distributed", "finetune.run", "finetune.evaluate", "finetune.sweep", "finetune.export",
    "finetune.doctor", "finetune.cli",
    "app",
)  # fmt: skip
MOST_DEEP = 10


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for top in ("finetune", "app") for path in ROOT.glob(f"{top}/**/*.py")}


def imported(name, inside_functions):
    """Modules of the tree that a module imports when it runs; what is only for annotations does not run."""
    modules, package = set(), name if FILES[name].stem == "__init__" else name.rpartition(".")[0]

    def visit(nodes):
        for node in nodes:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            if isinstance(node, ast.ImportFrom):
                module = resolve_name("." * node.level + (node.module or ""), package)
                parts = [f"{module}.{part.name}" for part in node.names]
                modules.update(part if part in FILES else module for part in parts)
            elif isinstance(node, ast.Import):
                modules.update(part.name for part in node.names)
            elif inside_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                visit(ast.iter_child_nodes(node))

    visit(ast.parse(FILES[name].read_text("utf-8")).body)
    return {other for other in modules if other in FILES and other != name}


def layer_of(name):
    return next((layer for layer in LAYERS if name == layer or name.startswith(f"{layer}.")), None)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(name for name in FILES if layer_of(name)))
def test_a_module_imports_nothing_higher(name):
    below = LAYERS[: LAYERS.index(layer_of(name)) + 1]
    assert {
        other for other in imported(name, inside_functions=True) if layer_of(other) and layer_of(other) not in below
    } == set()


def test_every_module_has_a_layer_and_the_page_imports_its_own_modules_relatively():
    assert {name for name in FILES if layer_of(name) is None} <= {"finetune", "finetune.__main__"}
    # It is `app` in a checkout and `finetune.app` where it is installed.
    sources = {name: path.read_text("utf-8") for name, path in FILES.items()}
    assert [name for name, source in sources.items() if re.search(r"^\s*(from|import) app\b", source, re.M)] == []


@pytest.mark.slow
def test_no_chain_of_imports_is_long():
    @functools.cache
    def depth(name):
        return 1 + max((depth(other) for other in imported(name, inside_functions=False)), default=0)

    deepest = max(FILES, key=depth)
    assert depth(deepest) <= MOST_DEEP, deepest
