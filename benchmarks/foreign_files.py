"""How many configuration files of other tools are read, by the folder of each tool.

    python benchmarks/foreign_files.py FOLDER [--messages]     # FOLDER/axolotl/..., FOLDER/torchtune/...
    python benchmarks/foreign_files.py FOLDER --checkout DIR   # with the package of another checkout: counts before and after

The tools' own example files are not in this repository: copy them from theirs, LLaMA-Factory's `examples` beside its `data`.
`read`: converted to a recipe. `refused`: for something that is not trained here, each key with its line. `unknown key`: only
for keys that the tool's table lacks, so that the file could perhaps be read. `another tool`: one sentence says whose file it
looks like. `not recognised`: read as a recipe, whose settings its keys are not. `error`: anything else than a message.
`--messages` prints the first line of each refusal.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUTCOMES = ("read", "refused", "unknown key", "another tool", "not recognised", "error")


def main() -> int:
    """Print a table in Markdown; returns 1 when a file ended in anything else than a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--messages", action="store_true")
    parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parents[1])
    options = parser.parse_args()
    sys.path.insert(0, str(options.checkout.resolve()))
    from finetune.errors import FinetuneError
    from finetune.recipe.load import load_recipe

    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in sorted(options.folder.rglob("*.y*ml")):
        tool = path.relative_to(options.folder).parts[0]
        outcome, message = outcome_of(path, load_recipe, FinetuneError)
        counts[tool][outcome] += 1
        if options.messages and message:
            print(f"{path.relative_to(options.folder)}: {outcome}: {message}")
    print(f"| tool | files | {' | '.join(OUTCOMES)} |\n| --- | --: | {' | '.join('--:' for _ in OUTCOMES)} |")
    for tool, by_outcome in counts.items():
        print(f"| {tool} | {by_outcome.total()} | {' | '.join(str(by_outcome[name]) for name in OUTCOMES)} |")
    return int(any(by_outcome["error"] for by_outcome in counts.values()))


def outcome_of(path: Path, load_recipe: Callable[[str], Any], refusal: type[Exception]) -> tuple[str, str]:
    """What became of a file, and the first line of its message."""
    try:
        load_recipe(str(path))
    except refusal as error:
        lines = str(error).strip().splitlines()
        problems = getattr(error, "problems", None) or lines
        if "looks like" in lines[0]:
            return "another tool", lines[0]
        if any("unknown setting" in problem for problem in problems):
            return "not recognised", lines[0]
        return "unknown key" if all("is not a key of" in problem for problem in problems) else "refused", lines[0]
    except Exception as error:  # noqa: BLE001 - what this counts
        return "error", f"{type(error).__name__}: {error}"
    return "read", ""


if __name__ == "__main__":
    sys.exit(main())
