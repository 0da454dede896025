"""Seconds from the link printed by `finetune ui` to the first contentful paint and to the title in Chromium.

    python benchmarks/first_paint.py --times 3

The browser is already open; each time a new page server is started in an empty folder. Target: first paint <= 3 s on 2 cores.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from screenshots import ARGUMENTS, page_started

_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def main() -> None:
    """Print the seconds of each start, and the medians."""
    from playwright.sync_api import sync_playwright

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--times", type=int, default=3)
    options = arguments.parse_args()
    paints, titles = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium") or None, args=ARGUMENTS)
        for _ in range(options.times):
            start_s, paint_s, title_s = visit(browser)
            print(
                f"link after {start_s:.2f} s; first paint {paint_s:.2f} s and title {title_s:.2f} s after the link", flush=True
            )
            paints.append(paint_s)
            titles.append(title_s)
        browser.close()
    print(f"median first paint {statistics.median(paints):.2f} s, title {statistics.median(titles):.2f} s")


def visit(browser: Any) -> tuple[float, float, float]:
    """Seconds to the printed link, and from the link to first paint and title."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with page_started(Path(folder)) as link:
            printed = time.perf_counter()
            page = browser.new_context().new_page()
            went_s = time.perf_counter() - printed
            page.goto(link, wait_until="commit")
            page.wait_for_function(_PAINT, polling=50)
            page.wait_for_selector("h1.ft-title", timeout=120_000)
            title_s = time.perf_counter() - printed
            paint_s = went_s + page.evaluate(_PAINT) / 1000
            page.context.close()
        return printed - began, paint_s, title_s


if __name__ == "__main__":
    main()
