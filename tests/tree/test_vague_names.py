"""`scripts/vague_names.py`, which `make check` calls, refuses a file with a vague name."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "vague_names.py"


def check(folder, source):
    (folder / "module.py").write_text(source)
    return subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def read(path):\n    found = path.read_text()\n", "found"),
        ("def read(\n    place): ...\n", "place"),
        ("def total(rows):\n    return sum(each.size for each in rows)\n", "each"),
        ("def order(rows):\n    rows.sort(key=lambda one: one.size)\n", "one"),
    ],
)
def test_a_vague_name_is_listed_with_its_line(tmp_path, source, name):
    process = check(tmp_path, source)
    assert (process.returncode, process.stdout) == (1, f"{tmp_path}/module.py:2: {name}\n"), process.stderr


def test_names_that_say_the_thing_and_attributes_of_others_pass(tmp_path):
    process = check(tmp_path, "def read(path):\n    lock = path.held\n    return dict(found=lock)\n")
    assert (process.returncode, process.stdout) == (0, ""), process.stderr
