"""The page's own files, at addresses that browsers cache."""

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
#: Folder of the page's files and of fetched files: another address after any change.
OWN_FOLDER = f"/ft/v{zlib.crc32(repr(_NAMES_AND_BODIES).encode()):08x}"


def own_file(path: Path) -> Callable[[Request], Response]:
    """Return the handler of a file."""
    body, media_type = path.read_bytes(), _KINDS[path.suffix]
    tag = f'"{zlib.crc32(body):08x}"'

    def handler(request: Request) -> Response:
        is_current = request.url.path.startswith(f"{OWN_FOLDER}/")
        # an address with an old checksum gets the current file, uncached
        headers = {"etag": tag, "cache-control": "private, max-age=31536000, immutable" if is_current else "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=media_type, headers=headers)

    return handler
