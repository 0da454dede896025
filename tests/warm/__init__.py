"""Pythons that have torch and the libraries around it imported already, for tests that start many commands."""

import os
import subprocess
import sys
import time
from pathlib import Path

_HERE = Path(__file__).parent
#: Stands for a Python interpreter, for a process that has the server's socket in WARM_PYTHON.
CLIENT = str(_HERE / "client.py")


def start_server(socket, owner, prefix=()):
    """Start the server behind that Python; it ends with the process `owner`. `prefix` stands before its command."""
    command = [*prefix, sys.executable, str(_HERE / "server.py"), str(socket), str(owner)]
    server = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(_HERE.parents[1])}, start_new_session=True)
    while not socket.exists():
        assert server.poll() is None
        time.sleep(0.05)
