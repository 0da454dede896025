"""Entry point of the command line."""

from __future__ import annotations

import errno
import gc
import logging
import os
import sys
import warnings

import typer

from finetune.cli.app import cli
from finetune.cli.output import report
from finetune.errors import CommandError, DiskFull, FinetuneError
from finetune.system import keep_private, let_waiting_threads_sleep, raise_gc_thresholds
from finetune.units import printable

_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)  # full or not writable


def process() -> int:
    """Run the command `finetune`, and return its exit code."""
    keep_private()
    raise_gc_thresholds()
    let_waiting_threads_sleep()  # before torch is imported, which reads the variable once
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # escape characters that the terminal can't encode
            stream.reconfigure(errors="backslashreplace")
    try:
        return main(alone=True)
    finally:
        gc.freeze()  # no collection at exit


def main(*, alone: bool = False) -> int:
    """Return a command's exit code. `alone`: the process runs nothing else."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # for developers of libraries; a user can't act on them
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it suggests downloading another kernel
    try:
        return int(cli(standalone_mode=False, obj=alone) or 0)  # typer.Exit arrives here as its code
    except FinetuneError as error:
        return report(error)
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # the reader of a pipe has ended, as in `finetune runs | head -1`
        return _closed_pipe()
    except OSError as error:
        if error.errno not in _DISK_ERRNOS:
            return _unexpected(error)
        filename = f"{error.filename}: " if error.filename else ""
        fix = "Free some space, or choose a folder that you can write to."
        return report(DiskFull(f"{filename}{error.strerror or error}", fix))
    except SystemExit as request:
        if isinstance(request.__context__, BrokenPipeError):  # typer turns it into SystemExit
            return _closed_pipe()
        raise
    except Exception as error:  # noqa: BLE001 - click's usage errors and unexpected ones
        return _unexpected(error)


def _closed_pipe() -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python's flush at exit would fail again
    return 0


def _unexpected(error: Exception) -> int:
    if hasattr(error, "format_message") and hasattr(error, "show"):  # typer carries its own copy of click's exceptions
        if "--json" in sys.argv:
            return report(CommandError(error.format_message()))
        error.show()
        return 2
    if os.environ.get("FINETUNE_TRACEBACK"):
        raise error
    message = f"Internal error: {type(error).__name__}: {error}"
    if "--json" in sys.argv:
        return report(FinetuneError(message))
    print(f"{printable(message)}\nRun it again with FINETUNE_TRACEBACK=1 to see where.", file=sys.stderr)
    return 1
