"""Random faults, and whether a result differs without a word: kills and full disks.

    python -m benchmarks.faults [--seed 0] [--minutes 60] [--kinds kills,disk] [--cases 200]

Prints a table of all cases by outcome, and ends with 1 when one of them ended otherwise than it must: another result without a
message, an internal error, a traceback. Runs are tiny ones on a CPU, forks of this process.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.fault_kinds import disk, kills
from benchmarks.fault_kinds.runs import import_worker
from benchmarks.fault_kinds.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable

#: A row of the table: its title, the usual number of cases, and what runs them.
Row = tuple[str, int, "Callable[[random.Random, Tally, Path], None]"]
_ROWS: dict[str, list[Row]] = {
    "kills": [(f"kills, {name}", 200, functools.partial(kills.kill_cases, name)) for name in kills.KINDS],
    "disk": [("disks that fill", 100, disk.disk_cases)],
}


def main() -> int:
    """Run the cases; 1 when one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--kinds", default=",".join(_ROWS))
    parser.add_argument("--only", default="", help="only rows of the table that have this text")
    parser.add_argument("--cases", type=int, help="cases of each row, instead of its usual number")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if unknown := sorted({*kinds} - {*_ROWS}):
        parser.error(f"--kinds {','.join(unknown)}: one of {', '.join(_ROWS)}")
    rows = [row for kind in kinds for row in _ROWS[kind] if options.only in row[0]]
    began, tallies = time.monotonic(), []
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    os.environ["FINETUNE_CACHE"] = str(folder / "cache")
    import_worker()
    for index, (title, target, run_cases) in enumerate(rows):
        now = time.monotonic()
        until = now + (began + options.minutes * 60 - now) / (len(rows) - index)
        tally = Tally(title, options.cases or target, until)
        (folder / str(index)).mkdir()
        run_cases(random.Random(f"{options.seed} {title}"), tally, folder / str(index))
        tallies.append(tally)
        print(tally.row(), flush=True)
    code = report(tallies)
    if not code:
        shutil.rmtree(folder)
    return code


def report(tallies: list[Tally]) -> int:
    """Print the table and the failures; 1 when there are any."""
    print("\n| faults | cases | outcomes |\n|---|---|---|")
    for tally in tallies:
        print(tally.row())
    failures = [line for tally in tallies for line in (tally.failures or tally.missing)]
    for line in failures:
        print(line)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
