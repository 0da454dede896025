"""Rewrites Gradio's HTML so that it loads nothing from other hosts, and adds our script, style and content security policy.

Scripts need a nonce that is new for each page, so markup injected through data can't run. Pages and Gradio's theme are
compressed, and its files are kept by the browser: their names change with their content.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from .. import language
from ..browser_files import FOLDER, has_charts
from ..language import FIRST_HTML, tr
from .guard import Asgi, Message, Receive, Scope, Send
from .own_files import OWN_FOLDER, compressed, without_unread

#: Gradio's script for a page in a frame of another site, which is refused here.
_FRAME_SCRIPT = re.compile(rb"<script>(?:(?!</script>).)*iframeResizer(?:(?!</script>).)*</script>", re.S)
#: Of Gradio's description of a component and of its properties, what no script of the page reads: documentation of an API, of
#: which no handler here is part, and what is meant for other components.
_UNREAD = ("api_info", "api_info_as_input", "api_info_as_output", "example_inputs", "skip_api", "component_class_id", "key")
_UNREAD_PROPERTIES = ("preserved_by_key", "name", "_selectable", "_retryable", "_undoable", "likeable", "streamable")
#: Properties that are false where they are left out.
_FALSE_IF_ABSENT = ("autoscroll", "autofocus", "submit_btn", "stop_btn", "rtl")
#: The same of a handler; and what may be left out where it has no value.
_UNREAD_OF_HANDLER = (
    "api_description", "batch", "max_batch_size", "collects_event_data", "scroll_to_output", "stream_every", "time_limit",
)  # fmt: skip
_OPTIONAL_OF_HANDLER = (
    "js", "js_implementation", "event_specific_args", "component_prop_inputs", "rendered_in", "render_id", "show_progress_on",
    "trigger_after", "trigger_only_on_success", "trigger_only_on_failure",
)  # fmt: skip
#: Part of the theme's address, under which browsers keep it: another number when `_smaller_theme` makes another text of it.
_THEME_FORM = 2
_FOREIGN = re.compile(rb"<(?:meta|link)\b[^>]*?(?:https?:)?//[^>]*?>|<meta\b[^>]*?(?:og:|twitter:)[^>]*?>", re.S)
#: Styles and scripts of every page; beside them those of New run and Run, the pages with the most controls, and of all others.
_SHARED: tuple[str, ...] = ("theme.css", "shell.css", "language.js", "page.js", "message.js")
_OF_CHARTS = ("uplot.css", "chart.css") if has_charts() else ()
_OF_PAGE: dict[str, tuple[str, ...]] = {
    "": ("svg_chart.css", "new_run.css", "new_run.js"),
    "run": (*_OF_CHARTS, "run.css", "run.js", "pick.js"),
}
_OF_OTHERS = (*_OF_CHARTS, "svg_chart.css", "run.css", "runs.css", "runs.js")
if (FOLDER / "inter.css").is_file():
    _SHARED = ("inter.css", *_SHARED)
#: A text in a script: `tr("Free")`.
SCRIPT_CALL = re.compile(r'\btr\(\s*"([^"\\]+)"')
_CONFIG = re.compile(rb"window\.gradio_config = (\{.*?\});</script>", re.S)
#: Properties of Gradio's components that are texts of the page; of those that show their value, that too.
_TEXTS = ("label", "info", "placeholder")
_SHOW_VALUE = ("html", "button", "uploadbutton")
#: Gradio's sign of loading counts its seconds, in each frame, for as long as the page is open: it isn't ended when the page has
#: loaded. Here it counts twice a second, so that an open page takes no time of a core.
_FEWER_FRAMES = r"""<script>{
const frame = requestAnimationFrame.bind(window), counts = (callback) => /performance\.now\(\)-.*\/1e3/.test(callback);
window.requestAnimationFrame = (callback) => counts(callback) ? setTimeout(callback, 500) : frame(callback);
}</script>"""
#: Answers that are compressed though they are no pages: Gradio's theme, and what its handlers return.
_COMPRESSED = ("/theme.css", "/gradio_api/run/predict")


def policy(nonce: str) -> bytes:
    """The content security policy of a page. Styles are inline in Gradio; scripts only from here or with the nonce.

    Gradio compiles its templates with eval, which only a script that runs already can call.
    """
    return (
        f"default-src 'none'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; manifest-src 'self'; base-uri 'self'; "
        "form-action 'none'; frame-src 'none'; frame-ancestors 'none'; object-src 'none'"
    ).encode()


class PageFilter:
    """Rewrites HTML answers; everything else passes unbuffered."""

    def __init__(self, app: Asgi) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        nonce = secrets.token_urlsafe(16)
        start: Message | None = None
        body = b""
        sent = {key.lower(): value.decode("latin1") for key, value in scope["headers"]}
        path, accepted = scope["path"], sent.get(b"accept-encoding", "")
        is_theme = path == "/theme.css" and b"v=" in scope.get("query_string", b"")  # its name has a checksum of its content
        code = language.preferred(sent.get(b"cookie", ""), sent.get(b"accept-language", ""))

        async def filtered(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"content-security-policy", policy(nonce))]}
                if (path.startswith("/assets/") or is_theme) and message["status"] == 200:
                    message["headers"].append((b"cache-control", b"private, max-age=31536000, immutable"))
                if _is_html(message) or path in _COMPRESSED:
                    start = message
                    return
            elif start is not None:
                body += message.get("body", b"")
                if message.get("more_body"):
                    return
                if _is_html(start):
                    body = rewritten(body, nonce, path)
                elif path == "/theme.css":
                    body = _smaller_theme(body)
                page, encoding = compressed(body, accepted)
                added = {**encoding, "content-length": str(len(page))}
                headers = [(key, value) for key, value in start["headers"] if key.lower() != b"content-length"]
                headers += [(key.encode(), value.encode()) for key, value in added.items()]
                await send({**start, "headers": headers})
                message = {"type": "http.response.body", "body": page}
            await send(message)

        plain = [(key, value) for key, value in scope["headers"] if key.lower() != b"accept-encoding"]
        compressible = scope["path"].startswith(("/assets/", "/static/", "/ft/"))
        with language.spoken(code):
            await self.app(scope if compressible else {**scope, "headers": plain}, receive, filtered)


def rewritten(page: bytes, nonce: str, path: str) -> bytes:
    """The page at `path` in this request's language, without foreign tags, with our styles and scripts, each with the nonce."""
    code = language.current()
    page = re.sub(rb'<html lang="[\w-]*"', f'<html lang="{"zh-CN" if code == "zh" else code}"'.encode(), page, count=1)
    page = _FRAME_SCRIPT.sub(b"", _CONFIG.sub(_translated, page, 1), 1)
    page = _FOREIGN.sub(b"", page).replace(b"</head>", _head(path), 1)
    return re.sub(rb"<script\b", f'<script nonce="{nonce}"'.encode(), page)


def _head(path: str) -> bytes:
    names = (*_SHARED, *_OF_PAGE.get(path.strip("/"), _OF_OTHERS))
    styles = "".join(f'<link rel="stylesheet" href="{OWN_FOLDER}/{name}">' for name in names if name.endswith(".css"))
    scripts = "".join(f'<script type="module" src="{OWN_FOLDER}/{name}"></script>' for name in names if name.endswith(".js"))
    texts = f'<script type="application/json" id="ft-texts">{_script_texts(language.current())}</script>'
    icon = f'<link rel="icon" type="image/svg+xml" href="{OWN_FOLDER}/favicon.svg">'
    return f"{icon}{_FEWER_FRAMES}{styles}{texts}{scripts}</head>".encode()


def _translated(match: re.Match[bytes]) -> bytes:
    """Gradio's description of the page with its texts translated, without what nothing here reads."""
    config = json.loads(match[1])
    for component in config["components"]:
        props = component["props"]
        _leave_out(component, _UNREAD)
        _leave_out(props, _UNREAD_PROPERTIES)
        _leave_out(props, [name for name in _FALSE_IF_ABSENT if props.get(name) is False])
        names = (*_TEXTS, "value") if component["type"] in _SHOW_VALUE else _TEXTS
        props.update({name: _translation(props[name]) for name in names if isinstance(props.get(name), str)})
        if isinstance(props.get("choices"), list):
            props["choices"] = [[tr(choice[0]), *choice[1:]] for choice in props["choices"] if isinstance(choice, list)]
    for handler in config["dependencies"]:
        _leave_out(handler, _UNREAD_OF_HANDLER)
        _leave_out(handler, [name for name in _OPTIONAL_OF_HANDLER if not handler.get(name)])
    _leave_out(config, ("layout", "body_css"))  # `page` has the layout, too; nothing reads the other
    config["theme_hash"] = f"{config.get('theme_hash')}-{_THEME_FORM}"
    current = config.get("current_page")
    config["page"] = {name: page for name, page in config["page"].items() if current in (name, None)}
    return b"window.gradio_config = " + _in_script(config).encode() + b";</script>"


def _smaller_theme(answer: bytes) -> bytes:
    """Gradio's theme without what its dark half repeats: plain values of the light one, and None. Any other answer as it is."""
    style = without_unread(answer, ".css").strip()
    halves = re.fullmatch(rb"(:root\{([^{}]*)\}[^{}]*\{)([^{}]*)\}", style)
    if halves is None:
        return answer
    light, inherited = halves[1], {text for text in halves[2].split(b";") if b"var(" not in text}
    dark = [text for text in halves[3].split(b";") if text not in inherited and not text.endswith(b":None")]
    return light + b";".join(dark) + b"}"


def _leave_out(values: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        values.pop(name, None)


def _translation(text: str) -> str:
    return FIRST_HTML[text]() if text in FIRST_HTML else tr(text) if text else text


def _in_script(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _script_texts(code: str) -> str:
    """The texts of all scripts that the catalogue of the language has, as JSON."""
    calls = (call for path in Path(__file__).parents[1].glob("*.js") for call in SCRIPT_CALL.finditer(path.read_text("utf-8")))
    catalogue = language.catalogue(code)
    return _in_script({text: catalogue[text] for text in sorted({call[1] for call in calls}) if text in catalogue})


def _is_html(message: Message) -> bool:
    return any(key.lower() == b"content-type" and value.startswith(b"text/html") for key, value in message["headers"])
