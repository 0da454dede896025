"""Shows this project's modules a Python of Windows: an interpreter of Linux imports this when the folder is on its PYTHONPATH.

What Windows lacks is missing: modules, os.fork, most signals. What it does in another way is done so: os.kill ends a process,
select takes only sockets, folders can't be opened. Other libraries see Linux. Not a test.
"""

import builtins
import errno
import fcntl
import multiprocessing
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

MISSING = {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
NOT_IN_OS = {
    "chown", "execv", "fork", "forkpty", "getegid", "geteuid", "getgid", "getloadavg", "getpgid", "getpgrp", "getuid",
    "killpg", "memfd_create", "mkfifo", "nice", "pidfd_open", "pipe2", "posix_spawn", "pread", "pwrite", "register_at_fork",
    "sched_getaffinity", "sendfile", "setpgid", "setsid", "statvfs", "sysconf", "uname", "wait", "O_CLOEXEC", "O_DIRECTORY",
    "O_NOFOLLOW", "O_NONBLOCK", "WNOHANG", "WIFSIGNALED",
}  # fmt: skip
SIGNALS = {"SIGTERM", "SIGINT", "SIGABRT", "SIGSEGV", "SIGFPE", "SIGILL"}
FLAGS = {"CREATE_NEW_PROCESS_GROUP": 0x200, "CREATE_NO_WINDOW": 0x08000000, "DETACHED_PROCESS": 0x8}


class Otherwise(types.ModuleType):
    """A module without some names, and with others instead."""

    def __init__(self, real, lacking=(), **instead):
        super().__init__(real.__name__)
        self.__dict__.update(instead, real=real, lacking=frozenset(lacking))

    def __getattr__(self, name):
        if name in self.lacking:
            raise AttributeError(f"module {self.real.__name__!r} has no attribute {name!r} on Windows")
        return getattr(self.real, name)


class Popen(subprocess.Popen):
    def __init__(self, *arguments, creationflags=0, **options):
        refused = {"pass_fds", "preexec_fn", "process_group", "start_new_session", "umask", "user", "group"} & set(options)
        assert not refused, f"not on Windows: {refused}"
        super().__init__(*arguments, **options, start_new_session=bool(creationflags & FLAGS["CREATE_NEW_PROCESS_GROUP"]))

    def send_signal(self, number):
        if number != signal.SIGTERM:
            raise ValueError(f"Unsupported signal: {number}")
        self.terminate()

    def terminate(self):
        super().send_signal(signal.SIGKILL)

    kill = terminate

    def poll(self):
        if (super().poll() or 0) < 0:
            self.returncode = 1
        return self.returncode


def kill(pid, _number):
    os.kill(pid, signal.SIGKILL)


def open_file(path, flags, *arguments, **options):
    if Path(path).is_dir():
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return os.open(path, flags, *arguments, **options)


def fsync(file):
    number = file if isinstance(file, int) else file.fileno()
    if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    os.fsync(number)


def select_sockets(*files):
    if not all(isinstance(file, socket.socket) for some in files[:3] for file in some):
        raise OSError(10038, "An operation was attempted on something that is not a socket")
    return select.select(*files)


def handle(number, handler):
    if signal.Signals(number).name not in SIGNALS:
        raise ValueError("invalid signal value")
    return signal.signal(number, handler)


OTHERWISE = {
    "os": Otherwise(
        os,
        NOT_IN_OS,
        name="nt", kill=kill, open=open_file, fsync=fsync,
    ),
    "signal": Otherwise(
        signal,
        {name for name in dir(signal) if name.startswith("SIG") and name not in {*SIGNALS, "SIG_IGN", "SIG_DFL"}}
        | {"alarm", "getitimer", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "siginterrupt", "sigwait"},
        signal=handle, SIGBREAK=21,
    ),
    "select": Otherwise(select, {"epoll", "poll"}, select=select_sockets),
    "socket": Otherwise(socket, {"AF_UNIX", "SO_REUSEPORT", "recv_fds", "send_fds"}),
    "subprocess": Otherwise(subprocess, Popen=Popen, **FLAGS),
    "platform": Otherwise(platform, system=lambda: "Windows", release=lambda: "11"),
    "sys": Otherwise(sys, platform="win32"),
}  # fmt: skip
real_import = builtins.__import__


def import_otherwise(name, globals=None, locals=None, fromlist=(), level=0):
    importer = globals or {}
    package = (importer.get("__package__") or importer.get("__name__") or "").partition(".")[0]
    if level == 0 and package in ("finetune", "app"):
        if name in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r} on Windows", name=name)
        if name in OTHERWISE:
            return OTHERWISE[name]
    return real_import(name, globals, locals, fromlist, level)


builtins.__import__ = import_otherwise
multiprocessing.set_start_method("spawn")
