"""Guard: checks each request before the app; fails closed."""

from __future__ import annotations

import hmac
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
OPEN_PATH = "/healthz"
UPLOAD_PATH = "/gradio_api/upload"
#: Routes that the page needs. All other routes answer 404, also routes that a new Gradio adds.
READ = re.compile(
    r"/(?:|run|runs|models|settings|config|theme\.css|favicon\.ico|manifest\.json|healthz)/?"
    r"|/(?:assets|static|ft)/[\w./@%+-]+"
    r"|/ft/(?:series|run)/[^/\x00-\x1f\x7f]{1,200}"  # run names may have other letters
    r"|/ft/report/[^/\x00-\x1f\x7f]{1,200}/(?:report|comparison)\.html"
    r"|/gradio_api/(?:startup-events|upload_progress|app_id|theme\.css|heartbeat/[\w-]+)"
)
WRITE = re.compile(r"/gradio_api/upload/?|/ft/new/change|/ft/page/[a-z]+|/ft/run/[^/\x00-\x1f\x7f]{1,200}")
BODY_BYTES, UPLOAD_BYTES = 2 * 2**20, 64 * 2**20
#: Limits of uploads: parallel uploads, bytes on disk, age on disk.
UPLOADS_AT_ONCE = 2
MOST_UPLOAD_BYTES = 512 * 2**20
MOST_UPLOAD_AGE_S = 3600.0

HEADERS = [
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
]
_OURS = {name for name, _ in HEADERS} | {b"content-security-policy", b"server"}


@dataclass(frozen=True)
class Access:
    """Token, port and host names of this server."""

    token: str
    port: int
    hosts: tuple[str, ...] = LOOPBACK
    any_port: bool = False  # a container's port mapping changes the port that browsers see

    @property
    def cookie(self) -> str:
        # with the port: two apps on one machine share their cookies
        return f"ft_token_{self.port}"

    def knows(self, host: str) -> bool:
        """Return whether a Host header names this server."""
        name, colon, port = host.rpartition(":")
        if not colon or not re.fullmatch("[0-9]{1,5}", port):
            name, port = host, "80"
        return name.lower() in self.hosts and (self.any_port or int(port) == self.port)


@dataclass(frozen=True)
class Refusal:
    """Answer to a refused request."""

    status: int
    text: str


class Guard:
    """ASGI application around the app."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _headers(scope)
        query = parse_qsl(scope.get("query_string", b"").decode("latin1"), keep_blank_values=True)
        linked = dict(query).get("token", "")
        refusal = self._refusal(scope, headers, linked)
        if refusal:
            await answer(send, refusal)
        elif linked and scope["method"] == "GET":
            await self._set_cookie(scope, send, query)
        else:
            limit = UPLOAD_BYTES if scope["path"].rstrip("/") == UPLOAD_PATH else BODY_BYTES
            await self.app(scope, _limited(receive, limit), _hardened(send))

    def _refusal(self, scope: Scope, headers: dict[str, str], linked: str) -> Refusal | None:
        # Gradio checks none of this: any site may upload
        method, path, host = scope["method"], scope["path"], headers.get("host", "")
        if not self.access.knows(host):
            return Refusal(421, "This host name is not allowed; see finetune ui --help, --allow-host.")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            return Refusal(403, "Requests from other sites are refused.")
        if method not in ("GET", "HEAD") and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return Refusal(403, "Requests from other sites are refused.")
        if path != OPEN_PATH and not self._has_token(headers, linked):
            return Refusal(401, "Open the link that `finetune ui` printed; it has the token.")
        if not _route_is_known(method, path):
            return Refusal(404, "Not found.")
        return _body_refusal(method, path, headers)

    def _has_token(self, headers: dict[str, str], linked: str) -> bool:
        bearer = headers.get("authorization", "")
        sent = [
            linked,
            _cookie(headers.get("cookie", ""), self.access.cookie),
            bearer[7:] if bearer.startswith("Bearer ") else "",
        ]
        wanted = self.access.token.encode()
        return any(hmac.compare_digest(token.encode("latin1", "replace"), wanted) for token in sent)

    async def _set_cookie(self, scope: Scope, send: Send, query: list[tuple[str, str]]) -> None:
        # out of the address: browsers keep addresses in their history
        query_string = urlencode([(name, value) for name, value in query if name != "token"])
        target = f"/{scope['path'].lstrip('/')}{'?' + query_string if query_string else ''}"
        cookie = f"{self.access.cookie}={self.access.token}; HttpOnly; SameSite=Strict; Path=/"
        headers = [
            (b"location", target.encode("latin1")),
            (b"set-cookie", cookie.encode()),
            (b"cache-control", b"no-store"),
            *HEADERS,
        ]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def _route_is_known(method: str, path: str) -> bool:
    if ".." in path or "//" in path:
        return False
    routes = READ if method in ("GET", "HEAD") else WRITE if method == "POST" else None
    return routes is not None and routes.fullmatch(path) is not None


def _body_refusal(method: str, path: str, headers: dict[str, str]) -> Refusal | None:
    if method != "POST":
        return None
    upload = path.rstrip("/") == UPLOAD_PATH
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != ("multipart/form-data" if upload else "application/json"):
        return Refusal(415, "Unsupported content type.")
    length = headers.get("content-length", "")
    if length and (not re.fullmatch("[0-9]{1,15}", length) or int(length) > (UPLOAD_BYTES if upload else BODY_BYTES)):
        return Refusal(413, "The request is too large.")
    return None


def _limited(receive: Receive, limit: int) -> Receive:
    got = 0

    async def counted() -> Message:
        nonlocal got
        message = await receive()
        got += len(message.get("body", b""))
        # counted: a missing or wrong content-length must not evade the limit
        if got > limit:
            return {"type": "http.disconnect"}
        return message

    return counted


def _hardened(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [
                (key, value)
                for key, value in message["headers"]
                if not key.lower().startswith(b"access-control-")
                and (key.lower() not in _OURS or key.lower() == b"content-security-policy")
            ]
            if not any(key.lower() == b"content-security-policy" for key, _ in headers):
                headers.append((b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; sandbox"))
            message = {**message, "headers": [*headers, *HEADERS]}
        await send(message)

    return sent


async def answer(send: Send, refusal: Refusal) -> None:
    """Send a refusal as plain text."""
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store"), *HEADERS]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{refusal.text}\n".encode()})


def _headers(scope: Scope) -> dict[str, str]:
    headers: dict[str, str] = {}
    for key, value in scope["headers"]:
        name = key.decode("latin1").lower()
        headers[name] = f"{headers[name]}, {value.decode('latin1')}" if name in headers else value.decode("latin1")
    return headers


def _cookie(header: str, name: str) -> str:
    for part in re.split(r"[;,]", header):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return ""


class UploadLimit:
    """Limits parallel uploads (429) and their bytes (507)."""

    def __init__(self, app: ASGIApp, folder: Path) -> None:
        self.app, self.folder, self._running = app, folder, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") != UPLOAD_PATH:
            return await self.app(scope, receive, send)
        if self._running >= UPLOADS_AT_ONCE:
            return await answer(send, Refusal(429, "Other uploads are running; try again when they are done."))
        if self._used_bytes() > MOST_UPLOAD_BYTES:
            return await answer(send, Refusal(507, "There is no space for more uploads now."))
        self._running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._running -= 1

    def _used_bytes(self) -> int:
        taken = 0
        for entry in self.folder.iterdir():
            # abandoned: used uploads are moved out of this folder
            if time.time() - entry.stat().st_mtime > MOST_UPLOAD_AGE_S:
                shutil.rmtree(entry, ignore_errors=True)
            else:
                taken += sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())
        return taken
