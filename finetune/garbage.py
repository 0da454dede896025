"""How often Python's cyclic garbage collector runs.

Importing torch and its libraries makes half a million lasting objects. Scanning them repeatedly takes a sixth of the start-up
time, and 1.5 s at exit. A training process collects as usual after its imports, since cycles can hold tensors.
"""

import gc

_USUAL = gc.get_threshold()


def collect_rarely() -> None:
    """Raise the thresholds, for short processes."""
    gc.set_threshold(50_000, 20, 20)


def collect_as_usual() -> None:
    """Restore the usual thresholds; objects that exist already are no longer scanned."""
    gc.freeze()
    gc.set_threshold(*_USUAL)


def leave_all() -> None:
    """Skip the collection at exit, for processes that somebody waits for."""
    gc.freeze()
