"""An answer that a fork of this process makes, so that a newer question ends the work at once, wherever it is."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Any

#: How often to look whether a newer question was asked.
_LOOK_S = 0.01


def answer_in_fork(
    make_answer: Callable[[], dict[str, Any]], is_superseded: Callable[[], bool], leave: tuple[int, ...] = ()
) -> dict[str, Any]:
    """What `make_answer` returns, as JSON has it; {"superseded": True} as soon as `is_superseded` says so; empty when the fork
    was killed by something else. The fork closes the file descriptors in `leave`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _write_and_exit(make_answer, writer, leave)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as answer:
        while not select.select([answer], [], [], _LOOK_S)[0]:
            if is_superseded():
                os.kill(child, signal.SIGKILL)
                threading.Thread(target=os.waitpid, args=(child, 0), daemon=True).start()  # freeing its memory takes time
                return {"superseded": True}
        text = answer.read()
    os.waitpid(child, 0)
    return dict(json.loads(text or "{}"))


def _write_and_exit(make_answer: Callable[[], dict[str, Any]], writer: int, leave: tuple[int, ...]) -> None:
    """In the fork."""
    try:
        for file in leave:
            os.close(file)
        with os.fdopen(writer, "w", encoding="utf-8") as answer:
            json.dump(make_answer(), answer, default=str)
    finally:
        os._exit(0)
