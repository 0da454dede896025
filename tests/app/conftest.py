"""The page in this process, and Chromium: for tests of what a browser shows of runs that are written by the test."""

import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from browser import CHROMIUM, serving, visits

import screenshots

ROOT = Path(__file__).resolve().parents[2]
Address = namedtuple("Address", "link, runs")


@pytest.fixture
def context(tmp_path):
    """The state of a page whose runs are in tmp_path/runs."""
    from app.web.followed import Context
    from app.workspace import Workspace

    context = Context(Workspace(tmp_path, tmp_path / "runs"), tmp_path / "temporary")
    yield context
    context.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    subprocess.run([sys.executable, str(ROOT / "scripts" / "browser_files.py")], check=True)
    root = tmp_path_factory.mktemp("workspace")
    with serving(root) as (port, _):
        yield Address(f"http://127.0.0.1:{port}/", root / "runs")


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
