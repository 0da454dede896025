"""Answers with the page's own files, compressed once; a browser that has a file asks only whether it is another one."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path

from fastapi import Request, Response

#: Below this many bytes an answer is not worth compressing.
_SMALL = 400


def compressed(body: bytes, accepted: str) -> tuple[bytes, dict[str, str]]:
    """The body as the browser takes it, and the headers that say so."""
    if "gzip" not in accepted or len(body) < _SMALL:
        return body, {"vary": "accept-encoding"}
    return gzip.compress(body, 6, mtime=0), {"vary": "accept-encoding", "content-encoding": "gzip"}


def own_file(path: Path, media_type: str) -> Callable[[Request], Response]:
    """The route's handler."""
    body = path.read_bytes()
    packed, headers = (body, {}) if path.suffix == ".woff2" else compressed(body, "gzip")
    tag = f'"{zlib.crc32(body):08x}"'

    def handler(request: Request) -> Response:
        shared = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=shared)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, media_type=media_type, headers={**shared, **headers})
        return Response(body, media_type=media_type, headers={**shared, "vary": "accept-encoding"})

    return handler
