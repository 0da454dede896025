"""How often Python's cyclic garbage collector runs.

Importing torch and its libraries makes half a million lasting objects. Scanning them repeatedly takes a sixth of the start-up
time, and 1.5 s at exit. A training process collects as usual after its imports, since cycles can hold tensors.
"""

import atexit
import gc
import os
import sys

_USUAL = gc.get_threshold()


def raise_gc_thresholds() -> None:
    """Raise the thresholds, for short processes. Called at the start: what it registers for the exit runs last."""
    gc.set_threshold(50_000, 20, 20)
    atexit.register(_hide_leak_report)


def restore_gc_thresholds() -> None:
    """Restore the usual thresholds; objects that exist already are no longer scanned."""
    gc.freeze()
    gc.set_threshold(*_USUAL)


def skip_gc_at_exit() -> None:
    """Skip the collection at exit, for processes whose end somebody waits for."""
    gc.freeze()


def _hide_leak_report() -> None:
    """Triton 3.9 writes thirty lines to stderr about objects that are not collected; its own processes hide them, too."""
    if gc.get_freeze_count() and "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
