"""Answers with the page's own files, compressed once. Their address has a checksum of them all, so a browser keeps them."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable
from pathlib import Path

from fastapi import Request, Response

from ..browser_files import fetched_files

_KINDS = {".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2", ".svg": "image/svg+xml"}
#: Files of the page itself.
OWN_FILES = sorted(path for path in Path(__file__).parents[1].glob("*") if path.suffix in _KINDS)
#: What a browser has no use for: lines of comment; space before a line, around a style's braces and after a property's name.
_UNREAD = {
    ".js": re.compile(rb"^[ \t]*(?://.*)?\n?", re.M),
    ".css": re.compile(rb"/\*.*?\*/|(?<=[{};\n])\s+|\s+(?=[{}])|(?<=[\w-]:)\s+", re.S),
}


def without_unread(body: bytes, suffix: str) -> bytes:
    """A script or a style without comments and indentation."""
    return _UNREAD[suffix].sub(b"", body)


def _served(path: Path) -> bytes:
    return without_unread(path.read_bytes(), path.suffix) if path in OWN_FILES and path.suffix in _UNREAD else path.read_bytes()


_NAMES_AND_BODIES = [(path.name.encode(), _served(path)) for path in [*OWN_FILES, *fetched_files()]]
#: Where the page asks for its own files and those of other projects: another folder when what is served changes.
OWN_FOLDER = f"/ft/v{zlib.crc32(repr(_NAMES_AND_BODIES).encode()):08x}"
#: Below this many bytes an answer is not worth compressing.
_SMALL = 400


def compressed(body: bytes, accepted: str) -> tuple[bytes, dict[str, str]]:
    """The body as the browser takes it, and the headers that say so."""
    if "gzip" not in accepted or len(body) < _SMALL:
        return body, {"vary": "accept-encoding"}
    return gzip.compress(body, 6, mtime=0), {"vary": "accept-encoding", "content-encoding": "gzip"}


def own_file(path: Path) -> Callable[[Request], Response]:
    """The route's handler."""
    body, media_type = _served(path), _KINDS[path.suffix]
    packed, headers = (body, {}) if path.suffix == ".woff2" else compressed(body, "gzip")
    tag = f'"{zlib.crc32(body):08x}"'

    def handler(request: Request) -> Response:
        is_current = request.url.path.startswith(f"{OWN_FOLDER}/")
        shared = {"etag": tag, "cache-control": "private, max-age=31536000, immutable" if is_current else "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=shared)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, media_type=media_type, headers={**shared, **headers})
        return Response(body, media_type=media_type, headers={**shared, "vary": "accept-encoding"})

    return handler
