"""Filter of Gradio's HTML: adds our parts, removes other hosts' content; the addresses of our files."""

from __future__ import annotations

import json
import re
import secrets
import traceback
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint

from .. import language
from ..views.markup import FETCHED, MEDIA_TYPES, fetched_files, has_charts, problem_of

#: Files of the page itself.
OWN_FILES = sorted(path for path in FETCHED.parent.glob("*") if path.suffix in MEDIA_TYPES)
_NAMES_AND_BODIES = [(path.name.encode(), path.read_bytes()) for path in [*OWN_FILES, *fetched_files()]]
#: Folder of the page's files and of fetched files: another address after any change.
OWN_FOLDER = f"/ft/v{zlib.crc32(repr(_NAMES_AND_BODIES).encode()):08x}"
#: Gradio's script for frames of other sites; frames are refused here.
_FRAME_SCRIPT = re.compile(rb"<script>(?:(?!</script>).)*iframeResizer(?:(?!</script>).)*</script>", re.S)
_FOREIGN = re.compile(rb"<(?:meta|link)\b[^>]*?(?:https?:)?//[^>]*?>|<meta\b[^>]*?(?:og:|twitter:)[^>]*?>", re.S)
#: Styles and scripts of every page, of New run and Run, and of all other pages.
_SHARED: tuple[str, ...] = ("theme.css", "shell.css", "language.js", "page.js", "parts.js")
_OF_CHARTS = ("uplot.css", "chart.css") if has_charts() else ()
_OF_PAGE: dict[str, tuple[str, ...]] = {
    "": ("svg_chart.css", "new_run.css", "new_run.js"),
    "run": (*_OF_CHARTS, "run.css", "run.js"),
}
_OF_OTHERS = (*_OF_CHARTS, "svg_chart.css", "run.css", "runs.css", "runs.js")
if (FETCHED / "inter.css").is_file():
    _SHARED = ("inter.css", *_SHARED)
#: Text in a script: `tr("Free")`.
SCRIPT_CALL = re.compile(r'\btr(?:_n)?\(\s*"([^"\\]+)"')
_CONFIG = re.compile(rb"window\.gradio_config = (\{.*?\});</script>", re.S)
_FOREVER = "private, max-age=31536000, immutable"
#: Makes HTML for the query of a request.
MakeHtml = Callable[[Mapping[str, str]], str]
#: Makers by the value of an HTML component: Gradio keeps one page for all requests.
FIRST_HTML: dict[str, MakeHtml] = {}


def own_file(path: Path) -> Callable[[Request], Response]:
    """Return the handler of a file."""
    body, media_type = path.read_bytes(), MEDIA_TYPES[path.suffix]

    def handler(request: Request) -> Response:
        is_current = request.url.path.startswith(f"{OWN_FOLDER}/")
        # an address with an old checksum gets the current file, uncached
        return Response(body, media_type=media_type, headers={"cache-control": _FOREVER if is_current else "no-cache"})

    return handler


def policy(nonce: str) -> str:
    """Return a page's content security policy."""
    return (
        # the nonce is new for each page: markup injected through data can't run
        # 'unsafe-eval': Gradio compiles its templates with eval, which only a script that already runs can call
        # 'unsafe-inline': Gradio's styles are inline
        f"default-src 'none'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; manifest-src 'self'; base-uri 'self'; "
        "form-action 'none'; frame-src 'none'; frame-ancestors 'none'; object-src 'none'"
    )


class PageFilter(BaseHTTPMiddleware):
    """Rewrites HTML answers; everything else passes unbuffered."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        nonce, path, headers = secrets.token_urlsafe(16), request.url.path, request.headers
        # the page can only be rewritten before it is compressed
        request.scope["headers"] = [pair for pair in headers.raw if pair[0] != b"accept-encoding"]
        with language.spoken(language.preferred(headers.get("cookie", ""), headers.get("accept-language", ""))):
            answer: Any = await call_next(request)
            answer.headers["content-security-policy"] = policy(nonce)
            if path.startswith(("/assets/", "/theme.css")) and answer.status_code == 200:  # their names contain a checksum
                answer.headers["cache-control"] = _FOREVER
            if not answer.headers.get("content-type", "").startswith("text/html") or "content-disposition" in answer.headers:
                return answer
            body = b"".join([part async for part in answer.body_iterator])
            page = await run_in_threadpool(rewritten, body, nonce, path, request.query_params)
            del answer.headers["content-length"]
            return Response(page, answer.status_code, answer.headers)


def rewritten(page: bytes, nonce: str, path: str, query: Mapping[str, str]) -> bytes:
    """Return the page with our HTML, styles, scripts and nonce."""
    code = language.current()
    page = re.sub(rb'<html lang="[\w-]*"', f'<html lang="{"zh-CN" if code == "zh" else code}"'.encode(), page, count=1)
    page = _CONFIG.sub(lambda config: _with_html(config, query), _FRAME_SCRIPT.sub(b"", page, 1), 1)
    page = _FOREIGN.sub(b"", page).replace(b"</head>", _head(path), 1)
    return re.sub(rb"<script\b", f'<script nonce="{nonce}"'.encode(), page)


def _head(path: str) -> bytes:
    names = (*_SHARED, *_OF_PAGE.get(path.strip("/"), _OF_OTHERS))
    styles = "".join(f'<link rel="stylesheet" href="{OWN_FOLDER}/{name}">' for name in names if name.endswith(".css"))
    scripts = "".join(f'<script type="module" src="{OWN_FOLDER}/{name}"></script>' for name in names if name.endswith(".js"))
    texts = f'<script type="application/json" id="ft-texts">{_script_texts(language.current())}</script>'
    icon = f'<link rel="icon" type="image/svg+xml" href="{OWN_FOLDER}/favicon.svg">'
    return f"{icon}{styles}{texts}{scripts}</head>".encode()


def _with_html(match: re.Match[bytes], query: Mapping[str, str]) -> bytes:
    config = json.loads(match[1])
    for props in (component["props"] for component in config["components"] if component["type"] == "html"):
        try:
            props["value"] = FIRST_HTML[props["value"]](query)
        except Exception as error:  # noqa: BLE001 - the remaining parts are shown
            traceback.print_exc()
            props["value"] = problem_of(error)
    return b"window.gradio_config = " + _in_script(config).encode() + b";</script>"


def _in_script(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _script_texts(code: str) -> str:
    # only texts that the scripts use: the catalogue is large
    calls = (call for path in Path(__file__).parents[1].glob("*.js") for call in SCRIPT_CALL.finditer(path.read_text("utf-8")))
    catalogue = language.catalogue(code)
    return _in_script({text: catalogue[text] for text in sorted({call[1] for call in calls}) if text in catalogue})
