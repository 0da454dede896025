"""Forks of a process that has imported what training needs, so that a run does not."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def import_worker() -> None:
    """Import what training needs, with one thread for each process; torch asks NVML whether there is a GPU, and opens none."""
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1"}
    import bitsandbytes  # noqa: F401
    import torch

    import finetune.model.sharded_loading
    import finetune.run.callbacks
    import finetune.run.training
    import finetune.run.worker  # noqa: F401

    torch.set_num_threads(1)
    # A fork gets a new thread pool before it has threads: of two that ask for the first one at once, one gets none.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def write_to(log: Path) -> None:
    """Append what this process writes to a file."""
    number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(number, 1)
    os.dup2(number, 2)


def start_fork(work: Callable[[], int | None], log: Path) -> int:
    """Run `work` in a fork whose output goes to `log`; returns its process id."""
    gc.freeze()  # or the collector of every fork would scan all objects of this process
    if pid := os.fork():
        return pid
    code = 99
    try:
        write_to(log)
        code = work() or 0
    except BaseException:  # noqa: BLE001 - a fork must never return into the benchmark
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(pid: int) -> int:
    """Exit status of a fork, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
