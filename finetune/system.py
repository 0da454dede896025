"""Processes, locks and signals on Linux and Windows; settings of a process."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from filelock import BaseFileLock


WINDOWS = sys.platform == "win32"  # native Windows; WSL is Linux
_IN_USE_S = 5.0  # seconds for which Windows may refuse to rename a file that a reader or a virus scanner has open
_CHECK_S = 0.05  # seconds for which `is_locked` waits: another process that only checks may hold the lock
_SEEK_LOCK = threading.Lock()  # on Windows, held from seeking to reading: threads share a file's position


def start_detached(command: list[str], log: IO[bytes] | int, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one and its terminal."""
    if sys.platform == "win32":  # a hidden console, which its children share
        options["creationflags"] = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
    else:
        options["start_new_session"] = True
    return subprocess.Popen(command, stdout=log, stderr=log, **{"stdin": subprocess.DEVNULL, **options})


def send_line(pipe: IO[bytes], value: Any) -> None:
    """Send a value to a child process. Raises OSError if it has ended."""
    pipe.write(json.dumps(value).encode() + b"\n")  # the pipe has no buffer to flush


def receive_line() -> Any:
    """Return a value sent by `send_line`; None if the parent closed the pipe."""
    line = sys.stdin.buffer.readline()
    return json.loads(line) if line else None


def redirect_output(log: Path) -> None:
    """Append this process's stdout and stderr to a file."""
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def exec_command(command: list[str]) -> int:
    """Replace this process by a command. Windows: return its exit code."""
    sys.stdout.flush()
    if sys.platform == "win32":
        process = subprocess.Popen(command)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the command, which ends itself
        return process.wait()
    return os.execv(command[0], command)


@contextlib.contextmanager
def caught_interrupts() -> Iterator[list[int]]:
    """Collect SIGINTs and SIGTERMs in a list."""
    received: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    previous_handlers = [signal.signal(number, lambda number, _frame: received.append(number)) for number in signals]
    try:
        yield received
    finally:
        for number, handler in zip(signals, previous_handlers, strict=True):
            signal.signal(number, handler)


def ignore_hangup() -> None:
    """Outlive the terminal: ignore SIGHUP."""
    if sys.platform != "win32":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def peak_rss_bytes() -> int:
    """Return this process's peak resident bytes."""
    if sys.platform == "win32":
        import psutil

        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    import resource

    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB on Linux
    # ru_maxrss can start at the peak of the process that started this one (fs/exec.c); VmHWM starts anew with exec
    _, label, peak_kib = Path("/proc/self/status").read_text(encoding="utf-8").partition("VmHWM:")
    return 1024 * (int(peak_kib.split()[0]) if label else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def return_freed_memory() -> None:
    """Return freed memory from glibc to the system."""
    # peak memory while quantising a model of 131 MB: 0.73 times its size, without this call 1.6 times
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def take_lock(path: Path, wait_s: float = 0.0) -> BaseFileLock | None:
    """Lock a file within `wait_s`; None if another process holds the lock."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=wait_s, poll_interval=0.01)
    except Timeout:
        return None
    return lock


def is_locked(path: Path) -> bool:
    """Return whether a process holds a file's lock."""
    if not path.exists():
        return False
    try:
        lock = take_lock(path, _CHECK_S)
    except OSError:
        return False
    if lock is None:
        return True
    lock.release()
    return False


def one_writer_at_a_time(path: Path) -> contextlib.AbstractContextManager[Any]:
    """Return a lock for appending a line to a file."""
    if not WINDOWS:  # Linux appends each write() as a whole
        return contextlib.nullcontext()
    from filelock import FileLock

    return FileLock(path.with_name(f".{path.name}.lock"))


def replace(source: Path, target: Path) -> None:
    """Rename a file over an existing file."""
    _retry_while_in_use(source.replace, target)


def rename(source: Path, target: Path) -> Path:
    """Rename a folder or file, and return its new path."""
    _retry_while_in_use(source.rename, target)
    return target


def _retry_while_in_use(move: Any, target: Path) -> None:
    deadline_s = time.monotonic() + (_IN_USE_S if WINDOWS else 0.0)
    while True:
        try:  # Windows refuses to rename open files
            move(target)
            return
        except PermissionError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(0.02)


def sync_file(path: Path) -> None:
    """Sync a file to disk."""
    descriptor = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)  # Windows syncs only writable descriptors
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_at(descriptor: int, begin: int, buffer: memoryview) -> int:
    """Fill `buffer` from a file's offset `begin`, and return the bytes read."""
    n_read = 0
    while n_read < len(buffer):
        if sys.platform == "win32":  # no preadv, and a duplicated descriptor would share the position
            with _SEEK_LOCK:
                os.lseek(descriptor, begin + n_read, os.SEEK_SET)
                data = os.read(descriptor, min(len(buffer) - n_read, 2**24))
            buffer[n_read : n_read + len(data)] = data
            count = len(data)
        else:
            count = os.preadv(descriptor, [buffer[n_read:]], begin + n_read)
        if not count:
            break
        n_read += count
    return n_read


def sync_folder(path: Path) -> None:
    """Sync a folder's list of files to disk."""
    if not WINDOWS:  # Windows can't open folders; NTFS logs names
        sync_file(path)


def link_or_copy(source: Path, target: Path) -> None:
    """Link to a file, or copy it on Windows."""
    if WINDOWS:  # symbolic links need a privilege
        shutil.copyfile(source, target)
    else:
        target.symlink_to(source)


def port_socket(family: int) -> socket.socket:
    """Return a socket that can reuse a just closed port."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    if not WINDOWS:  # on Windows, SO_REUSEADDR shares a port with another program
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listener


def shell_join(arguments: list[str]) -> str:
    """Quote arguments for the shell."""
    return subprocess.list2cmdline(arguments) if WINDOWS else shlex.join(arguments)


def let_waiting_threads_sleep() -> None:
    """Let OpenMP's waiting threads sleep; call before importing torch."""
    # by default they spin for milliseconds: with other programs on the CPU, small operators take twenty times as long
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


#: Without these, the hub's client also fetches a list of agents and sends the versions of libraries.
SETTINGS = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "USE_HUB_KERNELS": "0"}


def keep_private() -> None:
    """Disable telemetry and the package `kernels`."""
    os.environ.update(SETTINGS)
    # libraries load native code from the hub with `kernels`; bitsandbytes does so when imported on a CPU, and has no option
    sys.modules["kernels"] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError


# Importing torch and its libraries makes half a million lasting objects. Scanning them repeatedly takes a sixth of the start-up
# time, and 1.5 s at exit, which `gc.freeze()` saves.
_DEFAULT_THRESHOLDS = gc.get_threshold()


def raise_gc_thresholds() -> None:
    """Raise the thresholds before torch is imported."""
    gc.set_threshold(50_000, 20, 20)
    atexit.register(_hide_leak_report)  # exit handlers run in reverse order: the first registered runs last


def restore_gc_thresholds() -> None:
    """Restore the default thresholds before training."""
    gc.freeze()  # imported objects live until exit
    # reference cycles in training can hold tensors
    gc.set_threshold(*_DEFAULT_THRESHOLDS)


def _hide_leak_report() -> None:
    # Triton 3.9 reports uncollected objects on stderr in thirty lines; its own processes hide the report, too
    if gc.get_freeze_count() and "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
