"""uPlot and the font come from a registry by their hashes; without them the build says so."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_lockfile_has_hashes_and_names_no_registry():
    text = (ROOT / "package-lock.json").read_text()
    packages = {name: values for name, values in json.loads(text)["packages"].items() if name}
    assert set(packages) == {"node_modules/uplot", "node_modules/@fontsource-variable/inter"}
    assert all(values["integrity"].startswith("sha512-") and "resolved" not in values for values in packages.values())
    assert not re.search(r"registry|https?://(?!github\.com/sponsors)", text)


@pytest.fixture
def script(tmp_path):
    for name in ("package.json", "package-lock.json", ".npmrc", "scripts/browser_files.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    return str(tmp_path / "scripts" / "browser_files.py")


def test_without_npm_one_line_says_so(script, tmp_path):
    command = [sys.executable, "-S", script]
    process = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert process.stderr == "The page will have tables, not charts: uPlot could not be fetched (there is no npm).\n"


@pytest.mark.npm
@pytest.mark.slow
def test_the_files_are_fetched_with_their_licences(script, tmp_path):
    subprocess.run([sys.executable, script], check=True, env=dict(os.environ))
    files = {path.name: path for path in (tmp_path / "app" / "fetched").iterdir()}
    assert "MIT" in files["uplot.LICENSE"].read_text() and "SIL OPEN FONT LICENSE" in files["inter.LICENSE"].read_text()
    assert "uPlot" in files["uplot.js"].read_text() and files["inter.woff2"].read_bytes()[:4] == b"wOF2"
