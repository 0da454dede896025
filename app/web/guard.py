"""Guard: checks each request before the app, fails closed; and the filter of Gradio's pages."""

from __future__ import annotations

import hmac
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import language

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
OPEN_PATH = "/healthz"
UPLOAD_PATH = "/gradio_api/upload"
#: Routes that the page needs. All other routes answer 404, also routes that a new Gradio adds.
READ = re.compile(
    r"/(?:|run|runs|config|theme\.css|favicon\.ico|manifest\.json|healthz)/?"
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
HEADERS = {
    "x-frame-options": "DENY", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin", "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}  # fmt: skip
_FOREIGN = re.compile(rb"<(?:meta|link)\b[^>]*?(?:https?:)?//[^>]*?>|<meta\b[^>]*?(?:og:|twitter:)[^>]*?>", re.S)
#: For addresses that contain a checksum.
FOREVER = {"cache-control": "private, max-age=31536000, immutable"}


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


class Guard:
    """ASGI middleware: checks host, origin, token, route and size."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            if answer := self._refusal(request) or self._cookie_redirect(request):
                await answer(scope, receive, send)
            else:
                await self.app(scope, _limited(receive, _limit_bytes(request)), _hardened(send))
        elif scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})  # policy violation

    def _refusal(self, request: Request) -> Response | None:
        # Gradio checks none of this: without the guard any site could upload files
        method, path, headers = request.method, request.scope["path"], request.headers
        host, origin, is_read = headers.get("host", ""), headers.get("origin"), method in ("GET", "HEAD")
        if not self.access.knows(host):
            return _refused(421, "This host name is not allowed; see finetune ui --help, --allow-host.")
        is_foreign = origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}")
        if is_foreign or (not is_read and headers.get("sec-fetch-site", "none") not in ("same-origin", "none")):
            return _refused(403, "Requests from other sites are refused.")
        if path != OPEN_PATH and not self._has_token(request):
            return _refused(401, "Open the link that `finetune ui` printed; it has the token.")
        routes = READ if is_read else WRITE
        if not (is_read or method == "POST") or ".." in path or "//" in path or not routes.fullmatch(path):
            return _refused(404, "Not found.")
        kind, length = headers.get("content-type", "").partition(";")[0].strip().lower(), headers.get("content-length", "")
        if not is_read and kind != ("multipart/form-data" if _is_upload(request.scope) else "application/json"):
            return _refused(415, "Unsupported content type.")
        if not is_read and length and (not re.fullmatch("[0-9]{1,15}", length) or int(length) > _limit_bytes(request)):
            return _refused(413, "The request is too large.")
        return None

    def _has_token(self, request: Request) -> bool:
        bearer = request.headers.get("authorization", "")
        sent = [
            request.query_params.get("token", ""), request.cookies.get(self.access.cookie, ""),
            bearer[7:] if bearer.startswith("Bearer ") else "",
        ]  # fmt: skip
        expected = self.access.token.encode()
        return any(hmac.compare_digest(token.encode("latin1", "replace"), expected) for token in sent)

    def _cookie_redirect(self, request: Request) -> Response | None:
        if request.method != "GET" or not request.query_params.get("token"):
            return None
        # the token leaves the address, which browsers keep in their history
        query = urlencode([(name, value) for name, value in request.query_params.multi_items() if name != "token"])
        target = f"/{request.scope['path'].lstrip('/')}{'?' + query if query else ''}"
        cookie = f"{self.access.cookie}={self.access.token}; HttpOnly; SameSite=Strict; Path=/"
        return RedirectResponse(target, 303, {"set-cookie": cookie, "cache-control": "no-store", **HEADERS})


def _refused(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status, {"cache-control": "no-store", **HEADERS})


def _is_upload(scope: Scope) -> bool:
    return bool(scope["path"].rstrip("/") == UPLOAD_PATH)


def _limit_bytes(request: Request) -> int:
    return UPLOAD_BYTES if _is_upload(request.scope) else BODY_BYTES


def _limited(receive: Receive, limit: int) -> Receive:
    received_bytes = 0

    async def counted() -> Message:
        nonlocal received_bytes
        message = await receive()
        # counted here: a missing or wrong content-length must not evade the limit
        received_bytes += len(message.get("body", b""))
        if received_bytes > limit:
            return {"type": "http.disconnect"}
        return message

    return counted


def _hardened(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name in [name for name in headers if name.startswith("access-control-") or name == "server"]:
                del headers[name]
            headers.setdefault("content-security-policy", "default-src 'none'; frame-ancestors 'none'; sandbox")
            headers.update(HEADERS)
        await send(message)

    return sent


class UploadLimit:
    """ASGI middleware: limits parallel uploads (429) and stored bytes (507)."""

    def __init__(self, app: ASGIApp, folder: Path) -> None:
        self.app, self.folder, self._running = app, folder, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_upload(scope):
            return await self.app(scope, receive, send)
        if self._running >= UPLOADS_AT_ONCE:
            return await _refused(429, "Other uploads are running; try again when they are done.")(scope, receive, send)
        if self._used_bytes() > MOST_UPLOAD_BYTES:
            return await _refused(507, "There is no space for more uploads now.")(scope, receive, send)
        self._running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._running -= 1

    def _used_bytes(self) -> int:
        used_bytes = 0
        for entry in self.folder.iterdir():
            # abandoned: the app moves an upload that it uses out of this folder
            if time.time() - entry.stat().st_mtime > MOST_UPLOAD_AGE_S:
                shutil.rmtree(entry, ignore_errors=True)
            else:
                used_bytes += sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())
        return used_bytes


def _security_policy(nonce: str) -> str:
    return (
        # the nonce is new for each page: markup injected through data can't run
        # 'unsafe-eval': Gradio compiles its templates with eval, which only a script that already runs can call
        # 'unsafe-inline': Gradio's styles are inline
        f"default-src 'none'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; manifest-src 'self'; base-uri 'self'; "
        "form-action 'none'; frame-src 'none'; frame-ancestors 'none'; object-src 'none'"
    )


class PageFilter(BaseHTTPMiddleware):
    """Completes pages by `complete(page, path, query)`; everything else passes unbuffered."""

    def __init__(self, app: ASGIApp, complete: Callable[[bytes, str, Mapping[str, str]], bytes]) -> None:
        super().__init__(app)
        self._complete = complete

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        nonce, path, headers = secrets.token_urlsafe(16), request.url.path, request.headers
        # the page can only be rewritten before it is compressed
        request.scope["headers"] = [pair for pair in headers.raw if pair[0] != b"accept-encoding"]
        with language.use_language(language.preferred_language(headers.get("cookie", ""), headers.get("accept-language", ""))):
            answer: Any = await call_next(request)
            answer.headers["content-security-policy"] = _security_policy(nonce)
            if path.startswith(("/assets/", "/theme.css")) and answer.status_code == 200:
                answer.headers.update(FOREVER)
            if path.startswith("/ft/"):
                answer.headers.setdefault("cache-control", "no-store")
            if not answer.headers.get("content-type", "").startswith("text/html") or "content-disposition" in answer.headers:
                return answer
            body = _FOREIGN.sub(b"", b"".join([part async for part in answer.body_iterator]))
            page = await run_in_threadpool(self._complete, body, path, request.query_params)
            del answer.headers["content-length"]
            marked = re.sub(rb"<script\b", f'<script nonce="{nonce}"'.encode(), page)
            return Response(marked, answer.status_code, answer.headers)
