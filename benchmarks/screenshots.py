"""Screenshots of every page in both themes, wide and phone-sized; `docs/page.png` is one of them.

    python benchmarks/screenshots.py OUT [--runs runs] [--url LINK]

Without --url it starts its own `finetune ui`. Needs Chromium and playwright.
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

ADDRESSES = {"model": "", "fit": "fit", "run": "run", "runs": "runs", "try": "try", "result": "result"}
SIZES = {"wide": (1360, 900), "phone": (390, 844)}
ARGUMENTS = [
    "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-background-timer-throttling", "--disable-renderer-backgrounding",
]  # fmt: skip
_SETTLE_MS, _BUSY_MS = 4000, 180_000


def main() -> int:
    """Write the screenshots; returns 1 when a page logged an error in the browser's console."""
    parser = argparse.ArgumentParser(description="Screenshots of every page in both themes.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--url", help="link of a running page, with its token")
    parser.add_argument("--only", nargs="*", choices=list(ADDRESSES), default=list(ADDRESSES))
    chosen = parser.parse_args()
    out = chosen.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        link = chosen.url or stack.enter_context(page_started(Path.cwd(), "--runs", str(chosen.runs.absolute())))
        said = take(link, out, chosen.only)
    print("\n".join(said) or f"{out}: no errors in the console")
    return 1 if said else 0


@contextmanager
def page_started(folder: Path, *options: str) -> Iterator[str]:
    """Run `finetune ui` in `folder` on a free port for the `with` block; yields its link."""
    command = [sys.executable, "-m", "finetune", "ui", "--port", "0", *options]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as page:
        try:
            yield next(word for line in page.stdout or () for word in line.split() if word.startswith("http://"))
        finally:
            page.terminate()


def take(link: str, out: Path, pages: list[str]) -> list[str]:
    """Take each page in both themes and sizes; returns the console's errors."""
    from playwright.sync_api import sync_playwright

    said: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium") or None, args=ARGUMENTS)
        for size, (width, height) in SIZES.items():
            for theme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=_scheme(theme))
                first = context.new_page()
                first.goto(link)  # sets the cookie for the tabs below
                first.close()
                for page in pages:
                    address = f"{link.partition('?')[0].rstrip('/')}/{ADDRESSES[page]}"
                    said += _picture(context, address, out / f"{page}-{theme}-{size}.png")
                context.close()
        browser.close()
    return list(dict.fromkeys(said))


def _picture(context: Any, address: str, path: Path) -> list[str]:
    """Take one page; returns its console errors, without those of connections that break when the tab closes."""
    said: list[str] = []
    tab = context.new_page()
    tab.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(address)
    tab.wait_for_selector("h1.ft-title")
    tab.wait_for_timeout(_SETTLE_MS)
    tab.wait_for_function("!document.querySelector('.ft-busy')", timeout=_BUSY_MS)
    tab.screenshot(path=str(path), full_page=True)
    found = list(said)
    tab.close()
    return found


def _scheme(theme: str) -> Any:
    return theme


if __name__ == "__main__":
    sys.exit(main())
