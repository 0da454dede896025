"""The Gradio app: pages, navigation and theme."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import gradio as gr

from finetune import __version__
from finetune.card.visible import usable_devices
from finetune.errors import FinetuneError
from finetune.run.state import is_alive

from .context import Context
from .language import LANGUAGES, current
from .pages.models import ModelsPage
from .pages.new_run import NewRun
from .pages.run import RunPage
from .pages.runs import RunsPage
from .pages.settings import SettingsPage
from .views.markup import render
from .web.followed import FollowedPage
from .web.page_filter import FIRST_HTML, MakeHtml

#: Address, navigation name and class of each page; the first page is at the root.
PAGES = (
    ("", "New run", NewRun), ("run", "Run", RunPage), ("runs", "Runs", RunsPage), ("models", "Models", ModelsPage),
    ("settings", "Settings", SettingsPage),
)  # fmt: skip


class Rail(FollowedPage):
    """Running job and GPU memory, beside every page."""

    name, part_names, every_ms = "rail", ("now",), 3000

    def parts(self) -> dict[str, str]:
        run, live = next(filter(is_alive, self.context.workspace.list_runs()), None), None
        with contextlib.suppress(FinetuneError, OSError, ValueError):  # a damaged run
            if run is not None:
                followed = self.context.lives.of(run)
                followed.refresh()
                followed.plan()  # the template reads it
                live = followed
        return {"now": render("rail_status", live=live, gpus=usable_devices())}


def build_page(context: Context, api: Any) -> tuple[gr.Blocks, dict[str, Any]]:
    """Return the Gradio app and its mount options; add the pages' routes."""
    rail_page = Rail(context)
    rail_page.add_routes(api)
    pages = [(address, name, page(context)) for address, name, page in PAGES]
    # Gradio only carries HTML that each request makes, and `parts.js` keeps it current: no Gradio controls, no events
    with gr.Blocks(title="finetune", analytics_enabled=False, fill_width=True) as blocks:
        _page("", rail_page, pages[0][2])
    for address, name, page in pages[1:]:
        with blocks.route(name, f"/{address}"):
            _page(address, rail_page, page)
    for _, _, page in pages:
        page.add_routes(api)
    blocks.queue(api_open=False)
    return blocks, {"theme": _theme(), "favicon_path": str(Path(__file__).with_name("favicon.svg"))}


def _page(address: str, rail_page: Rail, page: Any) -> None:
    # Gradio always adds a navigation bar: it can only be hidden
    gr.Navbar(main_page_name=PAGES[0][1], visible=False)
    with gr.Column(elem_id="ft-rail"):
        _show(lambda query: render("rail", address=address))
        _show(rail_page.html, "ft-rail-now")
        _show(lambda query: render("rail_foot", languages=LANGUAGES, current=current(), version=__version__))
    _show(lambda query: '<div id="ft-main" tabindex="-1"></div>')
    _show(page.html)


def _show(make: MakeHtml, elem_id: str | None = None) -> None:
    # `PageFilter` replaces this name by HTML made from the request's query
    component = f"first-html-{len(FIRST_HTML)}"
    FIRST_HTML[component] = make
    # without Gradio's styles and click script
    gr.HTML(component, elem_id=elem_id, apply_default_css=False, js_on_load=None)


def _theme() -> gr.themes.Base:
    # system fonts as fallback: nothing is fetched from other hosts; colours are those of theme.css
    return gr.themes.Default(
        font=["Inter", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
        radius_size=gr.themes.sizes.radius_sm,
        spacing_size=gr.themes.sizes.spacing_md,
    )
