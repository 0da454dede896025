"""Screenshots of every page in both themes and at three widths; docs/tour/*.webp have all screenshots of a page.

    python benchmarks/screenshots.py OUT [--runs runs] [--url LINK] [--sheets docs/tour]

Without --url it starts `finetune ui` while it runs. Needs Chromium and playwright. `docs/page.png` and `docs/fit.png` are
made from run-light-wide.png and new-run-light-wide.png, the latter of a draft of `7b-4090` with the data `support`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

ADDRESSES = {
    "new run": "", "run": "run", "answers": "run?tab=answers", "chat": "run?tab=chat", "use": "run?tab=use", "runs": "runs",
}  # fmt: skip
SIZES = {"wide": (1440, 900), "middle": (1024, 768), "phone": (390, 844)}
THEMES = ("light", "dark")
ARGUMENTS = [
    "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-background-timer-throttling", "--disable-renderer-backgrounding",
]  # fmt: skip
_SETTLE_MS, _BUSY_MS = 4000, 180_000
#: Pixels of a sheet for each of a screenshot, and between them.
_SCALE, _GAP = 0.5, 12


def main() -> int:
    """Write the screenshots; returns 0, or 1 when a page logged an error in the console."""
    parser = argparse.ArgumentParser(description="Screenshots of every page in both themes.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--url", help="link to a running server, with its token")
    parser.add_argument("--only", nargs="*", choices=list(ADDRESSES), default=list(ADDRESSES))
    parser.add_argument("--sheets", type=Path, help="folder for one image per page with all its screenshots")
    chosen = parser.parse_args()
    out = chosen.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        link = chosen.url or stack.enter_context(page_started(Path.cwd(), "--runs", str(chosen.runs.absolute())))
        errors = take(link, out, chosen.only)
    for page in chosen.only if chosen.sheets else ():
        sheet(out, page).save(chosen.sheets / f"{page.replace(' ', '-')}.webp", quality=72, method=6)
    print("\n".join(errors) or f"{out}: no console errors")
    return 1 if errors else 0


@contextmanager
def page_started(folder: Path, *options: str) -> Iterator[str]:
    """`finetune ui` in `folder`, on a free port, for the block; yields the link that it prints."""
    command = [sys.executable, "-m", "finetune", "ui", "--port", "0", *options]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as page:
        try:
            yield next(word for line in page.stdout or () for word in line.split() if word.startswith("http://"))
        finally:
            page.terminate()


def take(link: str, out: Path, pages: list[str]) -> list[str]:
    """Visit each page in both themes and sizes; returns the console errors."""
    from playwright.sync_api import sync_playwright

    errors: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium") or None, args=ARGUMENTS)
        for size, (width, height) in SIZES.items():
            for theme in THEMES:
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
                first = context.new_page()
                first.goto(link)  # the cookie; each page then has a tab of its own
                first.close()
                for page in pages:
                    address = f"{link.partition('?')[0].rstrip('/')}/{ADDRESSES[page]}"
                    errors += _picture(context, address, out / f"{page.replace(' ', '-')}-{theme}-{size}.png")
                context.close()
        browser.close()
    return list(dict.fromkeys(errors))


def _picture(context: Any, address: str, path: Path) -> list[str]:
    """Take a screenshot of one page; returns its console errors, except for connections that closing the tab breaks."""
    errors: list[str] = []
    tab = context.new_page()
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(address)
    tab.wait_for_selector("h1.ft-title")
    tab.wait_for_timeout(_SETTLE_MS)
    tab.wait_for_function("!document.querySelector('.ft-busy, body[data-planning]')", timeout=_BUSY_MS)
    tab.screenshot(path=str(path), full_page=True)
    own_errors = list(errors)
    tab.close()
    return own_errors


def sheet(out: Path, page: str) -> Image.Image:
    """The first screens of a page: a row for each theme, a column for each width."""
    sizes = {size: (round(width * _SCALE), round(height * _SCALE)) for size, (width, height) in SIZES.items()}
    row_height = max(height for _, height in sizes.values())
    width = sum(width for width, _ in sizes.values()) + _GAP * (len(sizes) - 1)
    whole = Image.new("RGB", (width, len(THEMES) * row_height + _GAP), "#808080")
    for row, theme in enumerate(THEMES):
        left = 0
        for size, scaled in sizes.items():
            with Image.open(out / f"{page.replace(' ', '-')}-{theme}-{size}.png") as picture:
                first_screen = picture.convert("RGB").crop((0, 0, *SIZES[size])).resize(scaled, Image.Resampling.LANCZOS)
            whole.paste(first_screen, (left, row * (row_height + _GAP)))
            left += scaled[0] + _GAP
    return whole


if __name__ == "__main__":
    sys.exit(main())
