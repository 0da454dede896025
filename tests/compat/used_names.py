"""The names of other libraries that finetune and app use, and the keywords they pass, read from the source."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate"}
#: What differs between versions is asked for by name there.
GUARDED = ROOT / "finetune" / "compat"


def used() -> dict[str, set[str]]:
    """Dotted name -> keywords passed to it, in all files but those of finetune/compat."""
    keywords_by_name: dict[str, set[str]] = defaultdict(set)
    for part in ("finetune", "app"):
        for path in sorted((ROOT / part).rglob("*.py")):
            if GUARDED not in path.parents:
                for name, keywords in used_in(path.read_text(encoding="utf-8")).items():
                    keywords_by_name[name] |= keywords
    return keywords_by_name


def used_in(source: str) -> dict[str, set[str]]:
    """The same for one file's source."""
    tree, bound = ast.parse(source), {}
    keywords_by_name: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {alias.asname or alias.name.partition(".")[0]: alias.name if alias.asname else alias.name.partition(".")[0]
                      for alias in node.names}  # fmt: skip
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        keywords_by_name |= {name: keywords_by_name[name] for name in names if is_library(name)}
    makes = {**made_as(tree, bound), **bound}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and is_library(name := dotted(node, bound)):
            keywords_by_name[name] |= set()
        if not isinstance(node, ast.Call):
            continue
        if is_library(name := dotted(node.func, makes if isinstance(node.func, ast.Name) else bound)):
            keywords_by_name[name] |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return keywords_by_name


def made_as(tree: ast.Module, imported: dict[str, str]) -> dict[str, str]:
    """Classes of the file that are made as a library's is: name -> the library's class."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {node.name for node in classes if any(getattr(part, "name", "") == "__init__" for part in node.body)}
    return {node.name: dotted(node.bases[0], imported) for node in classes if node.bases and node.name not in own}


def dotted(node: ast.expr, imported: dict[str, str]) -> str:
    """The library's full name of an expression such as `torch.cuda.memory_stats`; empty for any other."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, "")
    inner = dotted(node.value, imported) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner else ""  # type: ignore[union-attr]


def is_library(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES
