"""A disk, a small tmpfs, that fills at a random moment of a run: paused, and after freeing space the same bits."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.fault_kinds.runs import fresh_copy, new_run, result_of, start_training, train, wait_for
from finetune.errors import DiskFull

if TYPE_CHECKING:
    from benchmarks.fault_kinds.tally import Tally

_DISK_BYTES, _BLOCK = 24 * 2**20, 4096


def disk_cases(rng: random.Random, tally: Tally, folder: Path) -> None:
    """Fill the disk under runs until the tally has its cases or the time is over."""
    unstarted, disk = new_run(folder / "unstarted"), folder / "disk"
    whole = fresh_copy(unstarted, folder / "whole")
    began = time.monotonic()
    if code := train(whole):
        tally.fail(f"on a disk with space: exit {code}")
        return
    lasts_s, expected = time.monotonic() - began, result_of(whole)
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        print("disk: a tmpfs can't be mounted here")
        return
    try:
        while tally.goes_on:
            run = fresh_copy(unstarted, disk / "run")
            (pid,) = start_training(run)
            after_s, free_bytes = rng.uniform(0, lasts_s), rng.choice((0, rng.randrange(2_000_000)))
            time.sleep(after_s)
            _fill(disk / "ballast", free_bytes)
            code = wait_for(pid)
            (disk / "ballast").unlink()
            problem = f"exit {code}" if code not in (0, DiskFull.exit_code) else ""
            if not problem and (resumed := train(run)):
                problem = f"resume: exit {resumed}"
            if not problem and result_of(run) != expected:
                problem = "another result"
            if problem:
                tally.fail(f"{free_bytes} bytes left after {after_s:.2f} of {lasts_s:.2f} s: {problem}; {_last_lines(run.log)}")
            else:
                tally.outcomes["paused, then equal" if code else "not noticed, equal"] += 1
            shutil.rmtree(run.path)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _fill(path: Path, free_bytes: int) -> None:
    """Fill the disk but for some bytes."""
    with path.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(_BLOCK))
        file.truncate(max(0, file.tell() - free_bytes))


def _last_lines(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-400:] if path.exists() else "no log"
