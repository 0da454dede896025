"""Thresholds of Python's garbage collector in processes with torch."""

# Importing the libraries makes half a million lasting objects. Scanning them repeatedly takes a sixth of the start-up time, and
# 1.5 s at exit, which `gc.freeze()` saves.

import atexit
import gc
import os
import sys

_USUAL = gc.get_threshold()


def raise_gc_thresholds() -> None:
    """Raise the thresholds, first in a process."""
    gc.set_threshold(50_000, 20, 20)
    # handlers run in reverse order: this one runs last
    atexit.register(_hide_leak_report)


def restore_gc_thresholds() -> None:
    """Restore the thresholds for training."""
    # cycles of training can hold tensors; existing objects last, and need no scan
    gc.freeze()
    gc.set_threshold(*_USUAL)


def _hide_leak_report() -> None:
    # Triton 3.9 writes thirty lines to stderr about objects that are not collected; its own processes hide them, too
    if gc.get_freeze_count() and "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
