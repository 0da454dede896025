"""CPU seconds, memory and waiting of `finetune data` with many rows: first time, killed and continued, and again.

python -m benchmarks.many_rows                # 1,000,000 rows, 476 MB
python -m benchmarks.many_rows --rows 100000

Writes a file of one-turn conversations into a temporary folder (--folder), with a cache of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TEXT = (
    "the model learns to answer short questions about rivers cities numbers and small machines which people keep in their homes"
    " while winter comes over mountains quickly today after every long quiet evening"
)


def write_rows(path: Path, rows: int) -> None:
    """A file of conversations, about 476 bytes each."""
    pick, vocabulary = random.Random(1), TEXT.split()

    def words(count: int) -> str:
        return " ".join(pick.choices(vocabulary, k=count))

    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            turns = (("user", f"{number} {words(26)}?"), ("assistant", f"{words(35)}."))
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")


def measure(command: list[str], folder: Path, until: int | None = None) -> dict[str, float]:
    """Seconds and peak memory of a command. `until`: it is killed when the cache has so many batches."""
    began = time.monotonic()
    environment = {**os.environ, "FINETUNE_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    first_s, peak, output_bytes, status, used = 0.0, 0, 0, None, None
    while used is None:
        exited, status, used_now = os.wait4(process.pid, os.WNOHANG)
        used = used_now if exited else None
        output_bytes += len(process.stderr.read() or b"")
        first_s = first_s or (time.monotonic() - began if output_bytes else 0.0)
        peak = max(peak, memory(process.pid))
        if until is not None and len(list((folder / "cache").rglob("*.arrow"))) >= until:
            process.send_signal(signal.SIGKILL)
            until = None
        time.sleep(0.5 if until is None else 0.1)
    cpu_s = used.ru_utime + used.ru_stime
    return {
        "wall_s": time.monotonic() - began, "cpu_s": cpu_s, "peak_bytes": peak, "first_output_s": first_s,
        "status": os.waitstatus_to_exitcode(status or 0),
    }  # fmt: skip


def memory(process: int) -> int:
    """Bytes of a process and its forks, each shared page counted once."""
    total = 0
    for name in (str(process), *_children(process)):
        try:
            for line in Path(f"/proc/{name}/smaps_rollup").read_text().splitlines():
                total += 1024 * int(line.split()[1]) if line.startswith("Pss:") else 0
        except OSError:
            continue
    return total


def _children(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return []


def main() -> int:
    """Print a line for each command. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where the file and the cache are made")
    parser.add_argument("--recipe", default="tiny-cpu")
    parser.add_argument("--kill", action="store_true", help="kill the first command in the middle and continue")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        path = folder / "rows.jsonl"
        write_rows(path, options.rows)
        print(f"{options.rows:,} rows, {path.stat().st_size / 1e6:.0f} MB", flush=True)
        command = [sys.executable, "-m", "finetune", "data", options.recipe, f"dataset.path={path}", "max_length=2048"]
        names = ["killed in the middle", "continued"] if options.kill else ["first command"]
        for name in (*names, "second command"):
            half = options.rows // 4096 // 2 if name.startswith("killed") else None
            costs = measure(command, folder, half)
            print(
                f"{name}: {costs['cpu_s']:.1f} CPU seconds, {costs['wall_s']:.1f} s, {costs['peak_bytes'] / 2**20:,.0f} MiB, "
                f"first output after {costs['first_output_s']:.1f} s, status {costs['status']}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
