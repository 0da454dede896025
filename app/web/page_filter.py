"""Filter of Gradio's pages: a nonce for their scripts, nothing of other hosts."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.types import ASGIApp

from .. import language

_FOREIGN = re.compile(rb"<(?:meta|link)\b[^>]*?(?:https?:)?//[^>]*?>|<meta\b[^>]*?(?:og:|twitter:)[^>]*?>", re.S)
#: For addresses that contain a checksum.
FOREVER = {"cache-control": "private, max-age=31536000, immutable"}


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
