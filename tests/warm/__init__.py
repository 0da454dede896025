"""Pythons that have torch and the libraries around it imported already, for tests that start many commands."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

_HERE = Path(__file__).parent
#: Stands for a Python interpreter, for a process that has the server's socket in WARM_PYTHON.
CLIENT = str(_HERE / "client.py")


@contextmanager
def warm_server(folder, prefix=()):
    """The server behind that Python, with its socket in `folder`; yields the socket. `prefix` stands before its command."""
    socket = folder / "socket"
    command = [*prefix, sys.executable, str(_HERE / "server.py"), str(socket)]
    server = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(_HERE.parents[1])}, start_new_session=True)
    try:
        while not socket.exists():
            assert server.poll() is None
            time.sleep(0.05)
        yield str(socket)
    finally:
        server.kill()
        server.wait()
