"""Builds the Gradio app: pages, navigation and theme. Each page is a module of app.pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from .context import Context
from .machine import Machine
from .pages import models, new_run, run, runs, settings
from .views import rail
from .views.binding import QUIET, show

#: Path, name in the navigation and builder of each page; the first one is at the root.
PAGES = (
    ("", "New run", new_run.build),
    ("run", "Run", run.build),
    ("runs", "Runs", runs.build),
    ("models", "Models", models.build),
    ("settings", "Settings", settings.build),
)

_TICK_S = 3.0


def build_page(context: Context) -> tuple[gr.Blocks, dict[str, Any]]:
    """The Gradio application, and the theme options for mounting it."""
    machine = Machine(context.workspace, context.lives)
    with gr.Blocks(title="finetune", analytics_enabled=False, fill_width=True) as page:
        _page(context, machine, page, *PAGES[0])
    for address, name, build in PAGES[1:]:
        with page.route(name, f"/{address}"):
            _page(context, machine, page, address, name, build)
    page.queue(api_open=False)
    return page, {"theme": _theme(), "favicon_path": str(Path(__file__).with_name("favicon.svg"))}


def _page(
    context: Context, machine: Machine, page: gr.Blocks, address: str, name: str, build: Callable[[Context, gr.Blocks], None]
) -> None:
    """One page with the rail. Gradio's own bar is hidden: it can't be left out."""
    gr.Navbar(main_page_name=name if address == PAGES[0][0] else PAGES[0][1], visible=False)
    _rail(context, machine, page, address)
    build(context, page)


def _rail(context: Context, machine: Machine, page: gr.Blocks, address: str) -> None:
    def status() -> str:
        return rail.status(*machine.status())

    with gr.Column(elem_id="ft-rail"):
        show(lambda: rail.rail(address))
        now = show(elem_id="ft-rail-now")
        show(rail.foot)
    show('<div id="ft-main" tabindex="-1"></div>')
    page.load(status, None, now, **QUIET)
    gr.Timer(_TICK_S).tick(status, None, now, **QUIET)


#: Tokens that Gradio's own components use: light and dark.
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
    """Inter where it is installed, else the system's font: nothing is fetched."""
    values = {name: light for name, (light, _) in _TOKENS.items()}
    values |= {f"{name}_dark": dark for name, (_, dark) in _TOKENS.items() if name != "color_accent"}
    return gr.themes.Default(
        primary_hue=gr.themes.colors.teal,
        neutral_hue=gr.themes.colors.gray,
        font=["Inter", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
        radius_size=gr.themes.sizes.radius_sm,
        spacing_size=gr.themes.sizes.spacing_md,
    ).set(**values)
