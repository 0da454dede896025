"""Measure the size of the source and fail when a figure is above its ceiling in size.json: `make size`.

A commit that lowers a figure stores it: `make size-store`. Ceilings only fall; to allow growth, edit size.json in a commit
that says why. `comments` is a floor and only rises. `lines` and `tokens` are Python's unless the row names another language.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

CEILINGS = Path("size.json")
FLOORS = {"source comments per 100 lines"}
#: Rows of lines only: name, folders, suffixes.
OTHER_FILES = (
    ("standin_gpu", ("standin_gpu",), (".py", ".c", ".cpp", ".h", ".inc")), ("JavaScript", ("app",), (".js",)),
    ("CSS", ("app",), (".css",)),
    ("templates", ("app",), (".html", ".jinja")), ("YAML and JSON in the package", ("finetune",), (".yaml", ".json")),
)  # fmt: skip
#: Telegram English: a pronoun in place of a noun, and other phrases that make a sentence hard to read.
CHAINS = re.compile(
    r"\b(that of|those of|those that|those which|these of|of which|of those|of that|that which|one that|ones that|one of them|"
    r"the same of|the others|the other ones|"
    r"what (?:is|was|has|have|had|a|an|the|it|they|its|one|needs?|can|could|does|do|differs|stays|takes)|"
    r"of (?:its|their|your|his) own|at once|of late|surely|so many|so much|asked for|learnt|as it is|as they are|"
    r"is to be|are to be|none of|is none|are none|another one|by it|with it|for it|to it|from it|of it)\b",
    re.IGNORECASE,
)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_COMMENT = re.compile(r"#\s*(fmt:|noqa|type:|pragma)")
LONGEST_FUNCTION = 60


def tracked(folders: tuple[str, ...], suffixes: tuple[str, ...]) -> list[Path]:
    """Return the existing files of `folders` that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *folders], capture_output=True, text=True, check=True
    )
    paths = (Path(line) for line in sorted({*listed.stdout.splitlines()}))
    return [path for path in paths if path.suffix in suffixes and path.is_file() and "fetched" not in path.parts]


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the docstrings of a module, its classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTION)) and ast.get_docstring(node) is not None:
            yield node.body[0].value  # type: ignore[attr-defined]


def tokens_and_comments(text: str, tree: ast.Module) -> tuple[int, int]:
    """Count names, operators, numbers and strings without docstrings; and comments, even after code.

    An f-string is one token, as in Python 3.11; the tokenizer of Python 3.12 also splits its content.
    """
    starts = {(node.lineno, node.col_offset) for node in docstrings(tree)}
    counted, comments, depth = 0, 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        counted += not depth and (
            name in ("NAME", "OP", "NUMBER", "FSTRING_START") or (name == "STRING" and token.start not in starts)
        )
        depth += (name == "FSTRING_START") - (name == "FSTRING_END")
        comments += name == "COMMENT" and not NO_COMMENT.match(token.string)
    return counted, comments


def imported_modules(tree: ast.Module) -> set[str]:
    """Return the dotted names that a file imports, `from a import b` as both `a` and `a.b`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def source_figures(paths: list[Path]) -> dict[str, float]:
    """Return all figures of the source, which is measured more closely than the rest."""
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths}
    totals: Counter[str] = Counter()
    importers = defaultdict(set)
    for path in paths:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        tokens, comments = tokens_and_comments(text, tree)
        functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTION)]
        prose = [str(node.value) for node in docstrings(tree)]
        totals["lines"] += len(text.splitlines())
        totals["tokens"] += tokens
        totals["files"] += 1
        totals["functions"] += len(functions)
        totals["long functions"] += sum((node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION for node in functions)
        totals["docstring words"] += sum(len(doc.split()) for doc in prose)
        totals["chains in docstrings"] += sum(len(CHAINS.findall(doc)) for doc in prose)
        totals["comments"] += comments
        for name in imported_modules(tree) & modules:
            importers[name].add(path)
    totals["modules with one importer"] = sum(len(places) == 1 for places in importers.values())
    per_100_lines = round(100 * totals.pop("comments") / max(1, totals["lines"]), 1)
    return {**totals, "comments per 100 lines": per_100_lines}


def measure() -> dict[str, float]:
    """Return each figure of the tree below the current folder, by its name."""
    figures = {f"source {name}": value for name, value in source_figures(tracked(("finetune", "app"), (".py",))).items()}
    for folder in ("tests", "benchmarks", "scripts"):
        texts = [path.read_text(encoding="utf-8") for path in tracked((folder,), (".py",))]
        figures[f"{folder} lines"] = sum(len(text.splitlines()) for text in texts)
        figures[f"{folder} tokens"] = sum(tokens_and_comments(text, ast.parse(text))[0] for text in texts)
    for name, folders, suffixes in OTHER_FILES:
        texts = [path.read_text(encoding="utf-8") for path in tracked(folders, suffixes)]
        figures[f"{name} lines"] = sum(len(text.splitlines()) for text in texts)
    return figures


def main() -> int:
    """Print every figure beside its ceiling; --store keeps the better figures."""
    figures = measure()
    bounds = json.loads(CEILINGS.read_text(encoding="utf-8")) if CEILINGS.exists() else {}
    sign = {name: -1 if name in FLOORS else 1 for name in figures}
    worse = {name for name, value in figures.items() if name in bounds and sign[name] * (value - bounds[name]) > 0}
    better = {name for name, value in figures.items() if name not in bounds or sign[name] * (value - bounds[name]) < 0}
    for name, value in figures.items():
        note = " ABOVE" if name in worse and name not in FLOORS else " BELOW" if name in worse else ""
        print(f"{name:40} {value:>9,}  {'at least' if name in FLOORS else 'at most':8} {bounds.get(name, value):>9,}{note}")
    if "--store" in sys.argv:
        ceilings = {name: value if name in better else bounds[name] for name, value in figures.items()}
        CEILINGS.write_text(json.dumps(ceilings, indent=1) + "\n", encoding="utf-8")
    elif better:
        print("Some figures are better than their bounds. Store them: make size-store")
    if worse:
        print(f"Over the ceiling: {', '.join(sorted(worse))}. Delete code, or raise the ceiling in size.json and say why.")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
