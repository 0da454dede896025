"""`scripts/size.py` counts what it says and fails when a figure grows; `scripts/vague_names.py` refuses a vague name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "size.py"
MODULE = '''"""The sum of it, which is that of those."""
import finetune.other


def total(rows):  # a reason
    """Return a sum."""
    return f"{sum(rows)} {len(rows):>{3}}"  # fmt: skip
'''


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    Path("finetune").mkdir()
    Path("finetune/other.py").write_text("")
    Path("finetune/module.py").write_text(MODULE)
    return Path("finetune/module.py")


def size(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def test_figures_are_what_they_say(tree):
    assert size("--store").returncode == 0
    figures = {name.removeprefix("source "): value for name, value in json.loads(Path("size.json").read_text()).items()}
    # import finetune.other: 4; def total(rows): 6; return and one f-string: 2
    assert (figures["lines"], figures["tokens"], figures["files"], figures["functions"]) == (7, 12, 2, 1)
    assert (figures["modules with one importer"], figures["docstring words"], figures["long functions"]) == (1, 12, 0)
    assert figures["chains in docstrings"] == 2
    assert figures["comments per 100 lines"] == pytest.approx(100 / 7, abs=0.1)


def test_growth_fails_and_its_ceiling_stays_until_what_is_smaller_is_stored(tree):
    size("--store")
    tree.write_text(MODULE + "\n\ndef more(): ...\n")
    grown = size("--store")
    assert grown.returncode == 1 and "source functions" in grown.stdout.splitlines()[-1]
    assert json.loads(Path("size.json").read_text())["source lines"] == 7
    tree.write_text(MODULE.replace('    """Return a sum."""\n', ""))
    assert "make size-store" in size().stdout
    assert size("--store").returncode == 0
    tree.write_text(MODULE)
    assert size().returncode == 1


VAGUE_NAMES = Path(__file__).resolve().parents[2] / "scripts" / "vague_names.py"
SOURCE = """\
def read(path):
    found = path.read_text()
    lock = path.held
    return sum(each.size for each in dict(found=lock))
"""


def test_a_vague_name_is_listed_with_its_line_and_a_name_of_others_is_not(tmp_path):
    (tmp_path / "module.py").write_text(SOURCE)
    process = subprocess.run([sys.executable, VAGUE_NAMES, tmp_path], capture_output=True, text=True)
    module = tmp_path / "module.py"
    assert (process.returncode, process.stdout) == (1, f"{module}:2: found\n{module}:4: each\n"), process.stderr
