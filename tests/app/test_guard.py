"""Attacks on the page, by raw HTTP against the real server: each is refused. Routes are the router's, so a new one counts."""

import contextlib
import http.client
import json
import os
import re
import socket
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from browser import TOKEN, serving
from starlette.routing import Mount, Route

from app.web.guard import LOOPBACK, READ, UPLOAD_PATH, WRITE, Access
from app.web.server import make_access, page_token
from finetune.errors import RecipeError

SECRET = "the words of a file that nobody asked to serve"


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    root = tmp_path_factory.mktemp("workspace")
    for name in ("secret.txt", "secret.yaml", "secret.jsonl"):
        (root / name).write_text(SECRET)
    with serving(root) as (port, application):
        yield port, application, root


def send(app, method, path, headers=None, body=None, *, token=TOKEN, host=None):
    """(status, headers, body) of one request; a stream's body is not waited for."""
    connection = http.client.HTTPConnection("127.0.0.1", app[0], timeout=300)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    connection.putheader("Host", host or f"127.0.0.1:{app[0]}")
    if token:
        connection.putheader("Cookie", f"ft_token_{app[0]}={token}")
    for name, value in (headers or {}).items():
        connection.putheader(name, value)
    if body is not None and "Transfer-Encoding" not in (headers or {}):
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    answer = connection.getresponse()
    data = b"" if "event-stream" in answer.headers.get("content-type", "") else answer.read()
    connection.close()
    return answer.status, {key.lower(): value for key, value in answer.getheaders()}, data


def multipart(name, content):
    head = f'--x\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
    return head.encode() + content + b"\r\n--x--\r\n", {"Content-Type": "multipart/form-data; boundary=x"}


def routes(app):
    """Every (method, path) of the router below the guard, Gradio's own ones too, with parameters filled in."""
    pairs = set()

    def walk(router, prefix=""):
        for route in router.routes:
            inner = getattr(route, "original_router", None) or (route.app if isinstance(route, Mount) else None)
            if inner is not None:
                walk(inner, prefix + getattr(route, "path", "").rstrip("/"))
                continue
            assert isinstance(route, Route), f"{route!r} can't be listed: teach this test about it"
            pairs.update((method, re.sub(r"\{[^}]*\}", "1", prefix + route.path)) for method in route.methods or {"GET"})

    walk(app[1].app.app.app.app)
    assert len(pairs) > 90, "Gradio's router was not found"
    return sorted(pairs)


def test_every_route_but_healthz_refuses_without_the_token_and_one_that_is_not_listed_even_with_it(app):
    for method, path in routes(app):
        status, _, body = send(
            app, method, path, {"Content-Type": "application/json"}, b"{}" if method == "POST" else None, token=None
        )
        assert status in ((200, 404) if path == "/healthz" else (401,)), (method, path)
        assert SECRET.encode() not in body
    unlisted = [
        (method, path) for method, path in routes(app) if not (READ if method in ("GET", "HEAD") else WRITE).fullmatch(path)
    ]
    assert len(unlisted) > 40
    for method, path in unlisted:
        body = b"{}" if method == "POST" else None
        assert send(app, method, path, {"Content-Type": "application/json"}, body)[0] == 404, (method, path)


def test_the_list_has_a_run_of_any_name_and_no_file_proxy_api_or_admin_route():
    api = (
        "file=/etc/passwd", "file/x", "proxy=http://127.0.0.1/", "stream/1/1/1/playlist.m3u8", "info", "openapi.json",
        "vibe-code",
    )  # fmt: skip
    pages = "monitoring", "docs", "openapi.json", "logout", "gradio_api/deep_link", "gradio_api/dev/reload", "gradio_api/runs"
    for path in (*(f"/gradio_api/{name}" for name in api), *(f"/{name}" for name in pages), "/gradio_api/custom_component/1/x"):
        assert not READ.fullmatch(path), path
    for name, passes in (("one", True), ("other run", True), ("Läufe", True), ("a\nb", False)):
        assert bool(READ.fullmatch(f"/ft/series/{name}")) == passes == bool(READ.fullmatch(f"/ft/run/{name}")), name
    for name in ("run/predict", "queue/join", "cancel", "api/x", "call/x", "component_server"):
        assert not WRITE.fullmatch(f"/gradio_api/{name}") and not WRITE.fullmatch("/login"), name


def test_a_foreign_host_is_refused_also_with_the_token(app):
    for host in ("evil.example:{port}", "127.0.0.1:1", "127.0.0.1.evil.example:{port}", "localhost", " "):
        status, _, body = send(app, "GET", "/config", host=host.format(port=app[0]))
        assert status in (400, 421) and b"components" not in body, host
    assert send(app, "GET", "/", host="127.0.0.1:\xb2")[0] == 421
    assert send(app, "GET", "/", host="127.0.0.1:" + "9" * 5000)[0] in (421, 431)


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1:{port}.evil.example", "file://", "", "http://["],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_foreign_origin_is_refused_and_never_echoed(app, origin, method):
    headers = {"Origin": origin.format(port=app[0]), "Content-Type": "application/json"}
    status, answered, _ = send(app, method, "/ft/page/runs", headers, b"{}" if method == "POST" else None)
    assert status == 403
    assert not [name for name in answered if name.startswith("access-control-")]


def test_posts_from_other_sites_and_of_other_kinds_of_content_are_refused(app):
    body, headers = multipart("a.jsonl", b"{}")
    for site in ("cross-site", "nonsense"):
        assert send(app, "POST", UPLOAD_PATH, {**headers, "Sec-Fetch-Site": site}, body)[0] == 403, site
    for kind in ({}, {"Content-Type": "text/plain; application/json"}, {"Content-Type": "application/json-patch+json"}):
        assert send(app, "POST", "/ft/page/runs", kind, b"{}")[0] == 415, kind


def test_gradio_handles_no_event_and_each_page_has_only_its_own_html(app):
    for address in ("/", "/run", "/runs"):
        page = send(app, "GET", address)[2]
        config = json.loads(re.search(rb"window.gradio_config = (\{.*?\});</script>", page, re.S)[1])
        assert config["dependencies"] == []
        values = [item["props"]["value"] for item in config["components"] if item["type"] == "html"]
        assert len(values) == 4 and sum("ft-page" in value or "new-run" in value for value in values) <= 2


def test_wrong_tokens_are_refused_in_every_place_and_a_bearer_of_the_right_one_passes(app):
    assert send(app, "GET", "/config", {"Authorization": f"Bearer {TOKEN}"}, token=None)[0] == 200
    for token in ("", TOKEN[:-1], TOKEN.upper(), "é" * 32):
        raw = token.encode().decode("latin1")
        assert send(app, "GET", "/?token=" + quote(token), token=None)[0] == 401, token
        assert send(app, "GET", "/", {"Authorization": f"Bearer {raw}"}, token=None)[0] == 401, token
        assert send(app, "GET", "/", token=raw)[0] == 401, token


def test_the_link_gives_a_cookie_that_scripts_and_other_sites_cannot_use_and_never_leads_to_another_host(app):
    status, headers, _ = send(app, "GET", f"/run?run=a%20b&token={TOKEN}", token=None)
    assert (status, headers["location"]) == (303, "/run?run=a+b")
    assert all(part in headers["set-cookie"] for part in ("HttpOnly", "SameSite=Strict", f"ft_token_{app[0]}="))
    assert Access(TOKEN, 7860).cookie != Access(TOKEN, 7861).cookie
    for path in ("//evil.example/", "/\\evil.example/", "/https://evil.example"):
        status, headers, _ = send(app, "GET", f"{path}?token={TOKEN}", token=None)
        assert status == 404 and "location" not in headers, path


def test_the_recipe_is_what_the_form_edits_and_a_file_is_kept_only_at_the_address_of_this_version(app):
    status, headers, body = send(app, "GET", "/ft/recipe.yaml")
    assert (status, body) == (200, b"") and headers["content-disposition"].startswith("attachment")
    change = {"Content-Type": "application/json"}, b'{"model": "tiny"}'
    assert send(app, "POST", "/ft/new/change", *change)[0] == 200
    assert send(app, "GET", "/ft/recipe.yaml")[2] == b"model_name_or_path: tiny\n"
    from app.page import STATIC_ADDRESS

    current, older = (send(app, "GET", f"{folder}/page.js") for folder in (STATIC_ADDRESS, "/ft/v0"))
    assert "immutable" in current[1]["cache-control"] and older[1]["cache-control"] == "no-cache"
    assert current[2] == older[2] and b"const update" in current[2]
    assert send(app, "GET", f"{STATIC_ADDRESS}/page.py")[0] == 404
    assert b'lang="zh"' in send(app, "GET", "/", {"Accept-Language": "zh-CN"})[2]


def test_paths_that_climb_out_files_of_the_working_folder_and_links_are_not_served(app):
    for path in (
        "/assets/../../../../etc/passwd", "/assets/..%2f..%2f..%2fetc/passwd", "/ft/../secret.txt", "/ft/server.py",
        "/gradio_api/file=../secret.txt", "/GRADIO_API/FILE=/etc/passwd", "/assets//etc/passwd",
    ):  # fmt: skip
        status, _, body = send(app, "GET", path)
        assert status in (400, 403, 404) and b"root:" not in body and SECRET.encode() not in body, path
    (app[2] / "link.txt").symlink_to("/etc/passwd")
    for name in ("secret.txt", "link.txt"):
        for path in (f"/gradio_api/file={app[2] / name}", f"/ft/{name}", f"/{name}", f"/static/{name}"):
            assert send(app, "GET", path)[0] == 404


def test_a_file_given_by_path_or_address_is_not_taken(app):
    """A handler that takes an upload must not be made to read another file of this machine, or of the network."""
    kind = {"Content-Type": "application/json"}
    names = ("secret.txt", "secret.yaml", "secret.jsonl")
    for path in (*(str(app[2] / name) for name in names), "/etc/passwd", "http://127.0.0.1:1/x", "\0"):
        send(app, "POST", "/ft/new/change", kind, json.dumps({"upload": path}).encode())
        picture = {"task": "picture", "values": {"path": path, "waiting": ""}}
        assert b"waiting" not in send(app, "POST", "/ft/run/any", kind, json.dumps(picture).encode())[2]
    time.sleep(1.0)
    draft = app[2] / "runs/.app/draft/draft.json"
    assert not draft.exists() or SECRET not in draft.read_text()
    assert all((app[2] / name).read_text() == SECRET for name in ("secret.txt", "secret.yaml", "secret.jsonl"))
    assert not list((app[2] / "runs/.app").glob("uploads/secret*"))
    assert not any((app[2] / "runs/.app").glob("chat/pictures/*"))


def test_a_body_over_the_limit_is_refused_with_and_without_a_length(app):
    kind = {"Content-Type": "application/json"}
    assert send(app, "POST", "/ft/page/runs", {**kind, "Content-Length": str(2**40)}, None)[0] == 413
    assert send(app, "POST", "/ft/page/runs", {**kind, "Content-Length": "-1"}, None)[0] in (400, 413)
    chunk = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
    with contextlib.suppress(OSError, http.client.HTTPException):
        status, _, _ = send(app, "POST", "/ft/page/runs", {**kind, "Transfer-Encoding": "chunked"}, chunk * 4 + b"0\r\n\r\n")
        assert status >= 400


def test_an_uploaded_name_never_leaves_the_upload_folder_and_a_flood_is_refused(app, monkeypatch):
    folder = Path(os.environ["GRADIO_TEMP_DIR"])
    for name in ("../../../evil.jsonl", "..%2fevil.jsonl", "\\..\\evil.jsonl"):
        body, headers = multipart(name, b"{}")
        status, _, answer = send(app, "POST", UPLOAD_PATH, headers, body)
        assert status != 200 or all(Path(path).resolve().is_relative_to(folder.resolve()) for path in json.loads(answer))
    (folder / "old").mkdir()
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    monkeypatch.setattr("app.web.guard.MOST_UPLOAD_BYTES", there + 1000)
    (folder / "old" / "x").write_bytes(b"x" * 2000)
    body, headers = multipart("a.jsonl", b"{}")
    assert send(app, "POST", UPLOAD_PATH, headers, body)[0] == 507
    os.utime(folder / "old", (0, 0))
    assert send(app, "POST", UPLOAD_PATH, headers, body)[0] == 200
    assert not (folder / "old").exists()
    monkeypatch.setattr("app.web.guard.UPLOADS_AT_ONCE", 0)
    assert send(app, "POST", UPLOAD_PATH, headers, body)[0] == 429


def test_every_answer_denies_framing_and_sniffing_and_the_page_loads_only_from_here_and_runs_marked_scripts(app):
    for path, token in (("/", TOKEN), ("/ft/page.js", TOKEN), ("/healthz", None), ("/", None), ("/nothing", TOKEN)):
        headers = send(app, "GET", path, token=token)[1]
        wanted = {"x-frame-options": "DENY", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
        assert wanted.items() <= headers.items(), path
    _, headers, page = send(app, "GET", "/")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "http" not in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    nonce = re.search(r"'nonce-([\w-]+)'", policy)[1].encode()
    assert all(b'nonce="' + nonce + b'"' in tag for tag in re.findall(rb"<script\b[^>]*>", page))
    assert not re.findall(rb"<(?:script|link|img|meta)\b[^>]*?(?:src|href|content)=[\"'](?:https?:)?//", page)
    assert send(app, "GET", "/")[1]["content-security-policy"] != policy


def test_websockets_and_other_methods_are_refused(app):
    with socket.create_connection(("127.0.0.1", app[0]), timeout=300) as raw:
        raw.sendall(
            f"GET /gradio_api/run/predict HTTP/1.1\r\nHost: 127.0.0.1:{app[0]}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        assert b" 101 " not in raw.recv(200)
    for method in ("PUT", "TRACE", "OPTIONS"):
        assert send(app, method, "/")[0] in (400, 404), method


def test_the_token_is_in_no_file_and_no_page(app):
    assert TOKEN.encode() not in send(app, "GET", "/")[2]
    assert TOKEN.encode() not in send(app, "GET", "/config")[2]
    for path in app[2].rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


def test_loopback_is_the_default_and_other_names_must_be_named():
    access, wide = make_access("127.0.0.1", 7860, TOKEN), make_access("0.0.0.0", 7860, TOKEN, ("gpu.lan",))
    assert access.hosts == LOOPBACK and not access.any_port
    assert wide.knows("gpu.lan:7860") and wide.knows("localhost:8080")
    assert not wide.knows("192.168.1.20:7860") and not wide.knows("evil.example:7860")


def test_a_token_that_keeps_nobody_out_is_refused_and_a_random_one_is_long_and_new_each_time(monkeypatch):
    for token in ("", "short", "with space and more", "a;b" * 10, "é" * 20):
        monkeypatch.setenv("FINETUNE_UI_TOKEN", token)
        with pytest.raises(RecipeError):
            page_token()
    monkeypatch.delenv("FINETUNE_UI_TOKEN", raising=False)
    assert len({page_token() for _ in range(10)}) == 10
    assert len(page_token()) >= 43
