"""What the browser loads is small: files are kept by their address, and hold nothing that a browser has no use for."""

import re

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from app.page import _theme
from app.web.own_files import OWN_FILES, OWN_FOLDER, own_file, without_unread
from app.web.page_filter import _smaller_theme


def test_a_file_is_kept_at_the_address_of_this_version_and_asked_for_anew_at_another():
    path = next(path for path in OWN_FILES if path.name == "page.js")
    browser = TestClient(Starlette(routes=[Route("/ft/{version}/page.js", own_file(path))]))
    current, older = (browser.get(f"{folder}/page.js") for folder in (OWN_FOLDER, "/ft/v0"))
    assert "immutable" in current.headers["cache-control"] and older.headers["cache-control"] == "no-cache"
    assert current.text == older.text and "const update" in current.text and "\n//" not in current.text
    unchanged = browser.get("/ft/v0/page.js", headers={"if-none-match": older.headers["etag"]})
    assert unchanged.status_code == 304 and unchanged.content == b""


@pytest.mark.parametrize("path", [path for path in OWN_FILES if path.suffix == ".js"], ids=lambda path: path.name)
def test_lines_that_begin_like_a_comment_are_not_in_a_text(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [number for number, line in enumerate(lines) if line.lstrip().startswith("//")]
    assert [number for number in comments if "".join(lines[:number]).count("`") % 2] == []


@pytest.mark.parametrize("path", [path for path in OWN_FILES if path.suffix == ".css"], ids=lambda path: path.name)
def test_a_style_without_comments_and_spaces_has_the_same_rules(path):
    def rules(text):
        parts = [" ".join(part.split()) for part in re.split(r"[{};]", re.sub(r"/\*.*?\*/", "", text, flags=re.S))]
        return [(name, value.strip()) for name, _, value in (part.partition(":") for part in parts)]

    style = path.read_text(encoding="utf-8")
    assert rules(without_unread(style.encode(), ".css").decode()) == rules(style)


def test_gradios_theme_has_the_same_values_in_dark_without_what_light_has():
    def values(style):
        light, dark = (dict(re.findall(r"(--[\w-]+):\s*([^;}]*)", half)) for half in re.split(r":root\.dark[^{]*", style))
        return light, {name: value for name, value in {**light, **dark}.items() if value != "None"}

    style = _theme()._get_theme_css()
    smaller = _smaller_theme(style.encode()).decode()
    assert values(smaller) == values(style) and len(smaller) < 0.8 * len(style)
    assert _smaller_theme(b'{"detail":"Method Not Allowed"}') == b'{"detail":"Method Not Allowed"}'
