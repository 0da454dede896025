"""How often Python looks for garbage in reference cycles.

Importing torch and the libraries around it makes half a million objects that stay. Looking through them again and again takes
a sixth of a start, and a second and a half when Python ends. A training process does it as usual once they are there, since
cycles can hold tensors.
"""

import gc

_USUAL = gc.get_threshold()


def collect_rarely() -> None:
    """For processes that import, answer and end."""
    gc.set_threshold(50_000, 20, 20)


def collect_as_usual() -> None:
    """From now on; what is there already is not looked at any more."""
    gc.freeze()
    gc.set_threshold(*_USUAL)


def leave_all() -> None:
    """The process ends, and all that it has goes with it. For processes that somebody waits for."""
    gc.freeze()
