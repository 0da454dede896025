"""The page in this process, and Chromium: for tests of what a browser shows of runs that are written by the test."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
from browser import CHROMIUM, TOKEN, visits

import screenshots

ROOT = Path(__file__).resolve().parents[2]
Address = namedtuple("Address", "link, runs")


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
    yield Address(f"http://127.0.0.1:{port}/", runs)
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
    """Open a page in a fresh context; what went wrong on the way fails the test at its end."""
    yield from visits(chromium, served.link)


@pytest.fixture(scope="session")
def require_accessible(tmp_path_factory):
    """require_accessible(page, *context): axe finds nothing wide, narrow or dark, small targets neither; nothing is wider."""
    folder = tmp_path_factory.mktemp("axe")
    subprocess.run(["npm", "pack", "axe-core@4"], cwd=folder, check=True, capture_output=True, timeout=300)
    subprocess.run(["tar", "xzf", next(folder.glob("*.tgz")).name], cwd=folder, check=True)
    script = (folder / "package/axe.min.js").read_text()

    def require(page, *context):
        page.evaluate(script)
        wide = page.viewport_size
        for width, is_dark in ((320, False), (wide["width"], False), (wide["width"], True)):  # dark: other colours
            rules = "runOnly: ['color-contrast']" if is_dark else "rules: {'target-size': {enabled: true}}"
            page.set_viewport_size({**wide, "width": width})
            page.evaluate("isDark => document.body.classList.toggle('dark', isDark)", is_dark)
            page.wait_for_timeout(500)
            page.wait_for_function("!document.getAnimations().some((motion) => motion instanceof CSSTransition)")
            page.wait_for_selector("body:not([data-lost])")  # a slow answer dims the head
            assert page.evaluate("document.body.classList.contains('dark')") == is_dark
            violations = page.evaluate(f"axe.run(document, {{resultTypes: ['violations'], {rules}}})")["violations"]
            shown = [(item["id"], [node["html"][:200] for node in item["nodes"][:3]]) for item in violations]
            assert shown == [], (*context, width, is_dark, json.dumps(shown, indent=1))
            assert page.evaluate("document.documentElement.scrollWidth") <= width + 1, (*context, width)

    return require
