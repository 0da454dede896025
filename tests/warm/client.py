#!/usr/bin/env -S python3 -IS
"""Stands for a Python interpreter: has the server of WARM_PYTHON run the command, passes signals on, ends as it ends."""

import json
import os
import signal
import socket
import sys
from pathlib import Path

connection = socket.socket(socket.AF_UNIX)
connection.connect(os.environ["WARM_PYTHON"])
wish = {"arguments": sys.argv[1:], "folder": str(Path.cwd()), "environment": dict(os.environ)}
socket.send_fds(connection, [json.dumps(wish).encode()], [0, 1, 2])
answers = connection.makefile()
child = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(child, number))
code = int(answers.readline() or 1)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
