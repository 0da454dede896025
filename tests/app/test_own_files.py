"""Browsers keep the page's own files by their address."""

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from app.web.own_files import OWN_FILES, OWN_FOLDER, own_file


def test_a_file_is_kept_at_the_address_of_this_version_and_asked_for_anew_at_another():
    path = next(path for path in OWN_FILES if path.name == "page.js")
    browser = TestClient(Starlette(routes=[Route("/ft/{version}/page.js", own_file(path))]))
    current, older = (browser.get(f"{folder}/page.js") for folder in (OWN_FOLDER, "/ft/v0"))
    assert "immutable" in current.headers["cache-control"] and older.headers["cache-control"] == "no-cache"
    assert current.text == older.text and "const update" in current.text
    unchanged = browser.get("/ft/v0/page.js", headers={"if-none-match": older.headers["etag"]})
    assert unchanged.status_code == 304 and unchanged.content == b""
