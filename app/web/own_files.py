"""Answers with the page's own files. Their address has a checksum of them all, so a browser keeps them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

from fastapi import Request, Response

from ..browser_files import fetched_files

_KINDS = {".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2", ".svg": "image/svg+xml"}
#: Files of the page itself.
OWN_FILES = sorted(path for path in Path(__file__).parents[1].glob("*") if path.suffix in _KINDS)
_NAMES_AND_BODIES = [(path.name.encode(), path.read_bytes()) for path in [*OWN_FILES, *fetched_files()]]
#: Where the page asks for its own files and those of other projects: another folder when what is served changes.
OWN_FOLDER = f"/ft/v{zlib.crc32(repr(_NAMES_AND_BODIES).encode()):08x}"


def own_file(path: Path) -> Callable[[Request], Response]:
    """The route's handler."""
    body, media_type = path.read_bytes(), _KINDS[path.suffix]
    tag = f'"{zlib.crc32(body):08x}"'

    def handler(request: Request) -> Response:
        is_current = request.url.path.startswith(f"{OWN_FOLDER}/")
        headers = {"etag": tag, "cache-control": "private, max-age=31536000, immutable" if is_current else "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=media_type, headers=headers)

    return handler
