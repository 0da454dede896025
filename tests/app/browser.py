"""The app as a user starts it, its pages in Chromium, and their texts."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def serving(root):
    """(port, application) of the page in a thread: guard, uploads, filter, FastAPI, Gradio."""
    import uvicorn

    from app.web.server import build, listen, make_access
    from app.workspace import Workspace

    before, bound = Path.cwd(), listen("127.0.0.1", 0)
    port = bound.getsockname()[1]
    application, context = build(Workspace(root, root / "runs"), make_access("127.0.0.1", port, TOKEN))
    config = uvicorn.Config(application, log_level="error", access_log=False, ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield port, application
    server.should_exit = True
    thread.join(30)
    context.close()
    os.chdir(before)


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


#: Words that are the same in Chinese: names, units and file endings.
NAMES = re.compile(
    r"finetune|LoRA|GPU|CPU|[KMG]iB|RTX|Hugging Face|OWNER/NAME|English|\.\w+|\d[\w.]*|hf auth login|HOUR|tokens?|CUDA|"
    r"CSV|bf16|NF4|AdamW|Logits|DoRA|Python|torch"
)
#: `key=value` and `--flag`.
OPTION = re.compile(r"(?<![\w-])--[a-z]|\b[a-z_][\w.]*=[\w\"'{]")


#: Texts that are seen or spoken, outside of recipes, commands, logs and what is said in a chat.
_SHOWN = """() => {
  const names = ["aria-label", "title", "placeholder", "alt"];
  const elsewhere = "script, style, code, pre, textarea, .ft-mono, .ft-log, .ft-turn p";
  const texts = new Set([document.title]), walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    if (!node.parentElement.closest(elsewhere) && node.parentElement.checkVisibility()) texts.add(node.textContent.trim());
  }
  for (const each of document.querySelectorAll(names.map((name) => `[${name}]`))) {
    if (each.checkVisibility()) for (const name of names) texts.add(each.getAttribute(name) ?? "");
  }
  return [...texts];
}"""


def english_texts(page, names=""):
    """Texts, seen or spoken by a screen reader, with English words that are no names, `names` (a pattern) neither."""
    shown = {text: NAMES.sub("", re.sub(names, "", text)) for text in page.evaluate(_SHOWN)}
    return [text for text, others in shown.items() if re.search(r"[A-Za-z]{2,}", others)]
