"""Lists local names and parameters that say nothing, such as `found` or `made`: `python scripts/vague_names.py [FOLDER ...]`.

Use a name for the value: `candidate`, `checkpoint_path`, `free_bytes`. The exit code is 1 if a name is listed.
"""

import ast
import sys
from pathlib import Path

FOLDERS = ("finetune", "app", "tests", "benchmarks", "standin_gpu", "scripts", "docs")
WORDS = {
    "found", "made", "held", "known", "one", "each", "place", "words", "told", "said", "room", "near", "again", "low", "same",
    "lost", "kept", "given", "done", "rest", "side", "put",
}  # fmt: skip
#: Real uses, by file and name, with the reason.
ALLOWED: dict[tuple[str, str], str] = {}


def vague_names(source: str) -> list[tuple[int, str]]:
    """Line and name of each vague parameter or local name of a file's functions."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    names = set()
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, functions)):
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add((node.lineno, node.id))
            elif isinstance(node, ast.arg):
                names.add((node.lineno, node.arg))
    return sorted((line, name) for line, name in names if name in WORDS)


if __name__ == "__main__":
    paths = [path for folder in sys.argv[1:] or FOLDERS for path in sorted(Path(folder).rglob("*.py"))]
    listed = [(path.as_posix(), *row) for path in paths for row in vague_names(path.read_text(encoding="utf-8"))]
    refused = [row for row in listed if (row[0], row[2]) not in ALLOWED]
    sys.stdout.writelines(f"{path}:{line}: {name}\n" for path, line, name in refused)
    sys.exit(bool(refused))
