"""The page in this process, and Chromium: for tests of what a browser shows of runs that are written by the test."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import screenshots

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "c" * 32
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LONG_S = 150


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    import uvicorn

    from app.web.server import build, listen, make_access
    from app.workspace import Workspace

    subprocess.run([sys.executable, str(ROOT / "scripts" / "browser_files.py")], check=True)
    before, runs = Path.cwd(), tmp_path_factory.mktemp("workspace") / "runs"
    bound = listen("127.0.0.1", 0)
    port = bound.getsockname()[1]
    application, context = build(Workspace(runs.parent, runs), make_access("127.0.0.1", port, TOKEN))
    config = uvicorn.Config(application, log_level="error", access_log=False, ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}/", runs
    server.should_exit = True
    thread.join(30)
    context.close()
    os.chdir(before)


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=screenshots.ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def visit(served, chromium):
    """Open a page in a fresh context and wait for its chart; what went wrong on the way fails the test at its end."""
    wrong, contexts = [], []

    def opened(address, **options):
        context = chromium.new_context(**{"viewport": {"width": 1360, "height": 900}, **options})
        context.set_default_timeout(LONG_S * 1000)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda sent: None if sent.url.startswith((served[0], "blob:", "data:")) else wrong.append(sent.url))
        tab.on("response", lambda answer: wrong.append(f"{answer.status} {answer.url}") if answer.status >= 500 else None)
        tab.goto(f"{served[0]}{address}{'&' if '?' in address else '?'}token={TOKEN}")
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("axe")
    subprocess.run(["npm", "pack", "axe-core@4"], cwd=folder, check=True, capture_output=True, timeout=300)
    subprocess.run(["tar", "xzf", next(folder.glob("*.tgz")).name], cwd=folder, check=True)
    return (folder / "package/axe.min.js").read_text()
