"""How many configuration files of other tools are read, by the folder of each tool.

    python benchmarks/foreign_files.py FOLDER [--messages]     # FOLDER/axolotl/..., FOLDER/torchtune/...

The tools' own example files are not in this repository: copy them from theirs. `read`: converted to a recipe; `refused`: with a
message that names a setting and what to do; `another tool`: one sentence says whose file it looks like; `error`: anything else
than a message. `--messages` prints the first line of each refusal.
"""

from __future__ import annotations

import argparse
import collections
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from finetune.errors import FinetuneError  # noqa: E402
from finetune.recipe.load import load_recipe  # noqa: E402

OUTCOMES = ("read", "refused", "another tool", "error")


def main() -> int:
    """Print a table in Markdown; returns 1 when a file ended in anything else than a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--messages", action="store_true")
    options = parser.parse_args()
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in sorted(options.folder.rglob("*.y*ml")):
        tool = path.relative_to(options.folder).parts[0]
        outcome, message = outcome_of(path)
        counts[tool][outcome] += 1
        if options.messages and message:
            print(f"{path.relative_to(options.folder)}: {outcome}: {message}")
    print(f"| tool | files | {' | '.join(OUTCOMES)} |\n| --- | --: | {' | '.join('--:' for _ in OUTCOMES)} |")
    for tool, by_outcome in counts.items():
        print(f"| {tool} | {by_outcome.total()} | {' | '.join(str(by_outcome[name]) for name in OUTCOMES)} |")
    return int(any(by_outcome["error"] for by_outcome in counts.values()))


def outcome_of(path: Path) -> tuple[str, str]:
    """What became of a file, and the first line of its message."""
    try:
        load_recipe(str(path))
    except FinetuneError as error:
        text = str(error).strip().splitlines()[0]
        return ("another tool" if "looks like" in text else "refused"), text
    except Exception as error:  # noqa: BLE001 - what this counts
        return "error", f"{type(error).__name__}: {error}"
    return "read", ""


if __name__ == "__main__":
    sys.exit(main())
