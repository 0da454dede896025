"""The Gradio app: pages, navigation and theme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from .context import Context
from .pages.models import ModelsPage
from .pages.new_run import NewRun
from .pages.rail import Rail
from .pages.run import RunPage
from .pages.runs import RunsPage
from .pages.settings import SettingsPage
from .views import rail
from .web.page_filter import FIRST_HTML, MakeHtml

#: Address, navigation name and class of each page; the first page is at the root.
PAGES = (
    ("", "New run", NewRun), ("run", "Run", RunPage), ("runs", "Runs", RunsPage), ("models", "Models", ModelsPage),
    ("settings", "Settings", SettingsPage),
)  # fmt: skip


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
        _show(lambda query: rail.rail(address))
        _show(rail_page.html, "ft-rail-now")
        _show(lambda query: rail.foot())
    _show(lambda query: '<div id="ft-main" tabindex="-1"></div>')
    _show(page.html)


def _show(make: MakeHtml, elem_id: str | None = None) -> None:
    # `PageFilter` replaces this name by HTML made from the request's query
    component = f"first-html-{len(FIRST_HTML)}"
    FIRST_HTML[component] = make
    # without Gradio's styles and click script
    gr.HTML(component, elem_id=elem_id, apply_default_css=False, js_on_load=None)


#: Tokens of Gradio's components: light and dark.
_TOKENS = {
    "body_background_fill": ("#f6f6f3", "#0d0e10"),
    "background_fill_primary": ("#ffffff", "#151619"), "background_fill_secondary": ("#f1f1ed", "#1c1e22"),
    "block_background_fill": ("#ffffff", "#151619"), "input_background_fill": ("#ffffff", "#151619"),
    "border_color_primary": ("#e5e4df", "#26282d"), "block_border_color": ("#e5e4df", "#26282d"),
    "input_border_color": ("#cfcec7", "#3b3e45"), "input_border_color_focus": ("#0b7565", "#3accb2"),
    "body_text_color": ("#17191d", "#eeeff0"), "body_text_color_subdued": ("#50545c", "#adb1b9"),
    "block_title_text_color": ("#17191d", "#eeeff0"), "block_label_text_color": ("#50545c", "#adb1b9"),
    "block_info_text_color": ("#50545c", "#adb1b9"), "input_placeholder_color": ("#676b74", "#8f949d"),
    "button_primary_background_fill": ("#0b7565", "#3accb2"), "button_primary_background_fill_hover": ("#095e52", "#5cdcc5"),
    "button_primary_text_color": ("#ffffff", "#04211c"), "button_primary_text_color_hover": ("#ffffff", "#04211c"),
    "button_primary_border_color": ("transparent", "transparent"),
    "button_secondary_background_fill": ("#ffffff", "#151619"),
    "button_secondary_background_fill_hover": ("#f1f1ed", "#1c1e22"),
    "button_secondary_border_color": ("#cfcec7", "#3b3e45"), "button_secondary_text_color": ("#17191d", "#eeeff0"),
    "button_cancel_background_fill": ("#ffffff", "#151619"), "button_cancel_background_fill_hover": ("#fbe7e5", "#3a1816"),
    "button_cancel_border_color": ("#cfcec7", "#3b3e45"), "button_cancel_text_color": ("#b3261e", "#ff8078"),
    "button_cancel_text_color_hover": ("#b3261e", "#ff8078"),
    "color_accent": ("#0b7565", "#0b7565"), "color_accent_soft": ("#e2f2ee", "#11302a"),
    "link_text_color": ("#0b7565", "#3accb2"), "link_text_color_hover": ("#0b7565", "#3accb2"),
    "slider_color": ("#0b7565", "#3accb2"), "checkbox_background_color_selected": ("#0b7565", "#0b7565"),
}  # fmt: skip


def _theme() -> gr.themes.Base:
    values = {name: light for name, (light, _) in _TOKENS.items()}
    values |= {f"{name}_dark": dark for name, (_, dark) in _TOKENS.items() if name != "color_accent"}
    return gr.themes.Default(
        primary_hue=gr.themes.colors.teal,
        neutral_hue=gr.themes.colors.gray,
        # system fonts as fallback: nothing is fetched from other hosts
        font=["Inter", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
        radius_size=gr.themes.sizes.radius_sm,
        spacing_size=gr.themes.sizes.spacing_md,
    ).set(**values)
