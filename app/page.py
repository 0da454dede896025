"""Builds the Gradio app: pages, navigation and theme. Each page is a module of app.pages."""

from __future__ import annotations

from typing import Any

import gradio as gr

from .context import Context
from .pages import chat, fit, model_data, result, run, runs

#: Path, name in the navigation and builder of each page; the first one is at the root.
PAGES = (
    ("", "Model & data", model_data.build),
    ("fit", "Fit", fit.build),
    ("run", "Run", run.build),
    ("runs", "Runs", runs.build),
    ("try", "Chat", chat.build),
    ("result", "Result", result.build),
)


def build_page(context: Context) -> tuple[gr.Blocks, dict[str, Any]]:
    """The Gradio application, and the theme options for mounting it."""
    with gr.Blocks(title="finetune", analytics_enabled=False, fill_width=True) as page:
        _top()
        PAGES[0][2](context, page)
    for address, name, build in PAGES[1:]:
        with page.route(name, f"/{address}"):
            _top()
            build(context, page)
    page.queue(api_open=False)
    return page, {"theme": _theme(), "favicon_path": None}


def _top() -> None:
    gr.Navbar(main_page_name=PAGES[0][1], visible=True)


def _theme() -> gr.themes.Base:
    """System fonts only: nothing is fetched."""
    return gr.themes.Default(
        primary_hue=gr.themes.colors.teal,
        neutral_hue=gr.themes.colors.slate,
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
        radius_size=gr.themes.sizes.radius_sm,
        spacing_size=gr.themes.sizes.spacing_md,
    ).set(  # text has a contrast of at least 4.5:1 in both themes
        body_text_color_subdued="#475569", body_text_color_subdued_dark="#a9b6c8",
        block_info_text_color="#475569", block_info_text_color_dark="#a9b6c8",
        block_label_text_color="#334155", block_label_text_color_dark="#cbd5e1",
        block_title_text_color="#334155", block_title_text_color_dark="#cbd5e1",
        button_primary_background_fill="#0f766e", button_primary_background_fill_hover="#115e59",
        button_primary_background_fill_dark="#0f766e", button_primary_background_fill_hover_dark="#115e59",
        button_primary_text_color="#ffffff", button_primary_text_color_dark="#ffffff",
        button_cancel_background_fill="#b91c1c", button_cancel_background_fill_hover="#991b1b",
        button_cancel_background_fill_dark="#b91c1c", button_cancel_background_fill_hover_dark="#991b1b",
        button_cancel_text_color="#ffffff", button_cancel_text_color_dark="#ffffff",
        input_placeholder_color="#64748b", input_placeholder_color_dark="#a9b6c8",
    )  # fmt: skip
