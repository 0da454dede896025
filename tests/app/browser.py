"""The app as a user starts it, and its pages in Chromium."""

import os
import re
import shutil
import signal
import subprocess
import sys

from finetune.run import control
from finetune.run.directory import list_runs

TOKEN = "b" * 32
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LONG_S = 150  # two cores may be shared with others; nothing here measures time
#: The app, whose own processes are started with another Python.
WITH_PYTHON = (
    "import runpy, sys; sys.executable = sys.argv.pop(1); runpy.run_module('app', run_name='__main__', alter_sys=True)"
)


class Served:
    """The app as a user starts it, in a folder of its own; with a `python`, its processes are that one's."""

    def __init__(self, folder):
        self.folder, self.process, self.link = folder, None, ""

    def start(self, python=None, port="0"):
        environment = {**os.environ, "FINETUNE_UI_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        command = ["-P", "-c", WITH_PYTHON, python, "--runs", "runs"] if python else ["-m", "finetune", "ui"]
        self.process = subprocess.Popen(
            [sys.executable, *command, "--port", port], cwd=self.folder, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        lines = []
        while line := self.process.stdout.readline():
            lines.append(line)
            if match := re.search(r"(http://\S+)\?token=", line):
                self.link = match[1]
                return self
        raise AssertionError("the app did not start: " + "".join(lines))

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def served_app(folder, forecasts, python):
    """Yields the app in this folder, with forecasts that other tests have made; in the end no run goes on."""
    (folder / "cache").mkdir()
    (folder / "cache" / "forecasts").symlink_to(forecasts)
    os.environ["FINETUNE_CACHE"] = str(folder / "cache")
    server = Served(folder).start(python)
    yield server
    server.kill()
    for run in list_runs(folder / "runs"):
        control.stop(run, signal.SIGKILL, now=True)


def visits(chromium, link):
    """Yields visit(address, **options), which opens a page in a fresh context; what went wrong in one is raised at the end."""
    wrong, contexts = [], []

    def visit(address="", **options):
        context = chromium.new_context(**{"viewport": {"width": 1360, "height": 900}, "reduced_motion": "reduce", **options})
        context.set_default_timeout(LONG_S * 1000)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda sent: None if sent.url.startswith((link, "blob:", "data:")) else wrong.append(sent.url))
        tab.on("response", lambda answer: wrong.append(f"{answer.status} {answer.url}") if answer.status >= 500 else None)
        tab.goto(f"{link}{address}{'&' if '?' in address else '?'}token={TOKEN}")
        return tab

    yield visit
    for context in contexts:
        context.close()
    assert not wrong, wrong
