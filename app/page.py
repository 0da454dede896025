"""The Gradio app: pages, navigation, settings and theme."""

from __future__ import annotations

import contextlib
import json
import os
import re
import traceback
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import HTTPException, Response
from fastapi.responses import FileResponse
from huggingface_hub import constants

from finetune import __version__
from finetune.card.visible import usable_devices
from finetune.errors import FinetuneError
from finetune.run.state import is_alive

from .background import Task
from .language import LANGUAGES, current, script_texts
from .pages.new_run import NewRun
from .pages.run import RunPage
from .pages.runs import RunsPage
from .views.markup import problem_of, render
from .web.followed import Context, FollowedPage
from .web.guard import FOREVER

#: Styles and scripts of every page, then of each page by its address; the build fetches some of them from npm.
_SHARED_FILES = ("inter.css", "theme.css", "shell.css", "language.js", "page.js", "parts.js")
_CHART_FILES = ("uplot.css", "chart.css")
_PAGE_FILES = {
    "": ("svg_chart.css", "new_run.css", "new_run.js"), "run": (*_CHART_FILES, "run.css", "run.js"),
    "runs": (*_CHART_FILES, "svg_chart.css", "run.css", "runs.css", "runs.js"),
}  # fmt: skip
_MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2", ".svg": "image/svg+xml"}
_APP = Path(__file__).parent
#: Served files by name: those in this folder, and uPlot and Inter if the build could fetch them.
STATIC_FILES = {
    path.name: path for folder in (_APP, _APP / "fetched") for path in sorted(folder.glob("*")) if path.suffix in _MEDIA_TYPES
}
#: Address of the folder of these files; it changes with their content, so that browsers can cache them forever.
STATIC_ADDRESS = f"/ft/v{zlib.crc32(b''.join(path.read_bytes() for path in STATIC_FILES.values())):08x}"
#: Functions that make a component's HTML from a request's query, by its name: Gradio keeps one page for all requests.
HTML_OF_COMPONENT: dict[str, Callable[[Mapping[str, str]], str]] = {}


class Rail(FollowedPage):
    """Column beside every page: running job, GPU memory, and a menu."""

    name = "rail"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._doctor = Task(context.workspace.root, context.workspace.folder("doctor"))

    def html(self, query: Mapping[str, str]) -> str:
        return render(
            "rail_now", parts={"now": "", "machine": ""}, languages=LANGUAGES, current=current(), version=__version__,
            has_token=bool(os.environ.get("HF_TOKEN")) or Path(constants.HF_TOKEN_PATH).is_file(),
        )  # fmt: skip

    def parts(self) -> dict[str, str]:
        shown_run = None
        if run := next(filter(is_alive, self.context.workspace.list_runs()), None):
            with contextlib.suppress(FinetuneError, OSError, ValueError):  # a damaged run
                live = self.context.lives.follow(run)
                live.refresh()
                live.plan()  # raises here rather than in the template
                shown_run = live
        status, findings = self._doctor.status(), None
        if status and status["state"] != "running":
            no_answer = {"check": "doctor", "state": "fail", "what": f"no answer: {self._doctor.output()[-400:]}", "fix": ""}
            findings = (self._doctor.result() or {}).get("findings", [no_answer])
        return {
            "now": render("rail_status", live=shown_run, gpus=usable_devices()),
            "machine": render("machine", status=status, findings=findings),
        }

    def act(self, message: Mapping[str, Any]) -> dict[str, str]:
        if message["examine"]:
            self._doctor.begin("doctor", "--json")
        return {}


#: Address, navigation name and class of each page; the first page is at the root.
PAGES = (("", "New run", NewRun), ("run", "Run", RunPage), ("runs", "Runs", RunsPage))


def build_page(context: Context, api: Any) -> tuple[gr.Blocks, dict[str, Any]]:
    """Return the Gradio app and its mount options; add the pages' routes."""
    api.get("/ft/v{version}/{name}")(_static_file)
    rail_page = Rail(context)
    rail_page.add_routes(api)
    pages = [(address, name, page(context)) for address, name, page in PAGES]
    # Gradio only carries HTML that each request makes, and `parts.js` keeps it current: no Gradio controls, no events
    with gr.Blocks(title="finetune", analytics_enabled=False, fill_width=True) as blocks:
        _add_page("", rail_page, pages[0][2])
    for address, name, page in pages[1:]:
        with blocks.route(name, f"/{address}"):
            _add_page(address, rail_page, page)
    for _, _, page in pages:
        page.add_routes(api)
    blocks.queue(api_open=False)
    # system fonts as fallback: nothing is fetched from other hosts; colours are those of theme.css
    theme = gr.themes.Default(
        font=["Inter", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
        radius_size=gr.themes.sizes.radius_sm, spacing_size=gr.themes.sizes.spacing_md,
    )  # fmt: skip
    return blocks, {"theme": theme, "favicon_path": str(STATIC_FILES["favicon.svg"])}


def _static_file(version: str, name: str) -> Response:
    # an address from before an update gets the current file, uncached
    if name not in STATIC_FILES:
        raise HTTPException(404, "Not found.")
    headers = FOREVER if f"/ft/v{version}" == STATIC_ADDRESS else {"cache-control": "no-cache"}
    return FileResponse(STATIC_FILES[name], headers=headers, media_type=_MEDIA_TYPES[STATIC_FILES[name].suffix])


def complete(page: bytes, path: str, query: Mapping[str, str]) -> bytes:
    """Return Gradio's page with language, styles, scripts and component HTML."""
    names = [name for name in (*_SHARED_FILES, *_PAGE_FILES.get(path.strip("/"), ())) if name in STATIC_FILES]
    head = "".join(f'<link rel="stylesheet" href="{STATIC_ADDRESS}/{name}">' for name in names if name.endswith(".css"))
    head += f'<script type="application/json" id="ft-texts">{_in_script(script_texts(current()))}</script>'
    head += "".join(f'<script type="module" src="{STATIC_ADDRESS}/{name}"></script>' for name in names if name.endswith(".js"))
    page = re.sub(rb'(<html\b[^>]*?lang=")[\w-]*', rb"\g<1>" + current().encode(), page, count=1)
    page = page.replace(b"</head>", f"{head}</head>".encode(), 1)

    def component(match: re.Match[bytes]) -> bytes:
        try:
            html = HTML_OF_COMPONENT[match[1].decode()](query)
        except Exception as error:  # noqa: BLE001 - the remaining parts are shown
            traceback.print_exc()
            html = problem_of(error)
        return _in_script(html).encode()

    return re.sub(rb'"(first-html-\d+)"', component, page)


def _in_script(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _add_page(address: str, rail_page: Rail, page: Any) -> None:
    # Gradio always adds a navigation bar: it can only be hidden
    gr.Navbar(main_page_name=PAGES[0][1], visible=False)
    with gr.Column(elem_id="ft-rail"):
        _add_html(lambda query: render("rail", address=address, tab=query.get("tab"), run=query.get("run")))
        _add_html(rail_page.html, "ft-rail-now")
    _add_html(lambda query: '<div id="ft-main" tabindex="-1"></div>')
    _add_html(page.html)


def _add_html(make_html: Callable[[Mapping[str, str]], str], elem_id: str | None = None) -> None:
    component = f"first-html-{len(HTML_OF_COMPONENT)}"
    HTML_OF_COMPONENT[component] = make_html
    # without Gradio's styles and click script
    gr.HTML(component, elem_id=elem_id, apply_default_css=False, js_on_load=None)
