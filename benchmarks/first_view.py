"""What a page's first view costs in Chromium: bytes sent, bytes decoded, bytes of a second view, and how much moved.

    python benchmarks/first_view.py [--pages "" runs fit]

Starts `finetune ui` in an empty folder; each page is opened in a browser that has nothing, then again in a tab beside it. Bars:
350 kB, 0.9 MB decoded, 30 kB again, layout shift 0.05. Returns 1 when one is exceeded.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from screenshots import ARGUMENTS, page_started

BARS = {"bytes": 350_000, "decoded_bytes": 900_000, "bytes_again": 30_000, "layout_shift": 0.05}
#: Bytes so far of what the page has loaded, itself included; and what the browser calls the sum of its shifts.
SIZES = """[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')].reduce(
    ([sent, decoded], entry) => [sent + entry.transferSize, decoded + entry.decodedBodySize], [0, 0])"""
_SHIFTS = """new Promise((done) => { new PerformanceObserver((list) => done(list.getEntries().reduce(
    (sum, entry) => sum + (entry.hadRecentInput ? 0 : entry.value), 0))).observe({ type: 'layout-shift', buffered: true });
    setTimeout(() => done(0), 500); })"""
_SETTLE_MS = 4000


def main() -> int:
    """Print a line of JSON for each page."""
    from playwright.sync_api import sync_playwright

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pages", nargs="*", default=["", "model", "data", "fit", "runs"])
    pages = arguments.parse_args().pages
    is_over = False
    with tempfile.TemporaryDirectory() as folder, page_started(Path(folder)) as link, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium") or None, args=ARGUMENTS)
        for page in pages:
            values = view(browser, link, page)
            print(json.dumps({"page": f"/{page}", **values}), flush=True)
            is_over = is_over or any(values[name] > bar for name, bar in BARS.items())
        browser.close()
    return 1 if is_over else 0


def view(browser: Any, link: str, page: str) -> dict[str, float]:
    """Bytes and shifts of the first view of a page, and bytes of the second."""
    address, _, query = link.partition("?")
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    sizes = []
    for _ in range(2):
        tab = context.new_page()
        tab.goto(f"{address.rstrip('/')}/{page}?{query}")
        tab.wait_for_selector("h1.ft-title")
        tab.wait_for_timeout(_SETTLE_MS)
        sizes.append((tab.evaluate(SIZES), tab.evaluate(_SHIFTS)))
    context.close()
    ((sent, decoded), shift), ((sent_again, _), _) = sizes
    return {"bytes": sent, "decoded_bytes": decoded, "bytes_again": sent_again, "layout_shift": round(shift, 3)}


if __name__ == "__main__":
    sys.exit(main())
