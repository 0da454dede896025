"""Thresholds of Python's garbage collector in processes that import torch."""

# Importing torch and its libraries makes half a million lasting objects. Scanning them repeatedly takes a sixth of the start-up
# time, and 1.5 s at exit, which `gc.freeze()` saves.

import atexit
import gc
import os
import sys

_DEFAULT_THRESHOLDS = gc.get_threshold()


def raise_gc_thresholds() -> None:
    """Raise the thresholds before torch is imported."""
    gc.set_threshold(50_000, 20, 20)
    atexit.register(_hide_leak_report)  # exit handlers run in reverse order: the first registered runs last


def restore_gc_thresholds() -> None:
    """Restore the default thresholds before training."""
    # training's reference cycles can hold tensors; the objects of the imports stay, so they need no scan
    gc.freeze()
    gc.set_threshold(*_DEFAULT_THRESHOLDS)


def _hide_leak_report() -> None:
    # Triton 3.9 reports uncollected objects on stderr in thirty lines; its own processes hide the report, too
    if gc.get_freeze_count() and "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
