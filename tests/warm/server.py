"""A Python that has everything imported and forks for each command that `client.py` hands over: `server.py SOCKET OWNER`.

A command runs in a session of its own, with the client's arguments, folder, environment, input and output. It saves the seconds
in which torch and the libraries around it are imported; nothing else is different. Not a test.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from pathlib import Path

CLIENT = Path(__file__).with_name("client.py")


def main():
    path, owner = Path(sys.argv[1]), os.pidfd_open(int(sys.argv[2]))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the handlers
    Path(f"{path}.new").rename(path)  # from now on clients find it
    while owner not in select.select([listener, owner], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            handle(connection, listener)
        connection.close()


def warm_up():
    gc.disable()
    with cuda_is_not_asked():
        import finetune.cli.app
        import finetune.cli.render
        import finetune.data.preparation
        import finetune.memory.depth
        import finetune.run.callbacks
        import finetune.run.prepare
        import finetune.run.training
        import finetune.run.worker  # noqa: F401

    renew_thread_pool_in_forks()
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def cuda_is_not_asked():
    """Imported, libraries ask for GPUs, bitsandbytes to name its library's file; after that no fork can use CUDA."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    real = torch.cuda.device_count, torch.cuda.get_device_capability
    torch.cuda.device_count, torch.cuda.get_device_capability = lambda: 1, lambda _: (8, 9)
    yield
    torch.cuda.device_count, torch.cuda.get_device_capability = real


def renew_thread_pool_in_forks():
    """Have a fork renew torch's thread pool before it has threads: of two that ask for the first one at once, one gets none."""
    import torch

    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


def handle(connection, listener):
    """Start the command, say its process id, and its status when it has ended; end it when the client is gone."""
    arguments, files, _, _ = socket.recv_fds(connection, 2**20, 3)
    child = os.fork()
    if child == 0:
        connection.close()
        listener.close()
        run(json.loads(arguments), files)
    with contextlib.suppress(OSError):  # the client is gone already, which select tells
        connection.sendall(f"{child}\n".encode())
    ended = os.pidfd_open(child)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def run(wish, files):
    """Become the command. Does not return."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.clear()
    os.environ.update(wish["environment"])
    os.chdir(wish["folder"])
    sys.executable, sys.argv = str(CLIENT), ["", *wish["arguments"]]
    sys.orig_argv = [sys.executable, *wish["arguments"]]
    warnings.simplefilter("ignore", RuntimeWarning)  # that a module which is run was imported before
    code = 1
    try:
        customize(os.environ.get("PYTHONPATH", ""))
        start()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else _said(end.code)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # on a full disk
                stream.flush()
        os._exit(code)


def _said(message):
    sys.stderr.write(f"{message}\n")
    return 1


def customize(path):
    for folder in filter(None, path.split(os.pathsep)):
        if (Path(folder) / "sitecustomize.py").is_file():
            runpy.run_path(f"{folder}/sitecustomize.py")


def start():
    """As `python [-P] [-u] (-m MODULE | -c CODE | FILE) ARGUMENTS` does."""
    arguments = sys.argv[1:]
    while arguments[0] in ("-P", "-u"):
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
