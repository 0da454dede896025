"""`scripts/vague_names.py`, which `make check` calls, refuses a file with a vague name."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "vague_names.py"
SOURCE = """\
def read(path):
    found = path.read_text()
    lock = path.held
    return sum(each.size for each in dict(found=lock))
"""


def test_a_vague_name_is_listed_with_its_line_and_a_name_of_others_is_not(tmp_path):
    (tmp_path / "module.py").write_text(SOURCE)
    process = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    module = tmp_path / "module.py"
    assert (process.returncode, process.stdout) == (1, f"{module}:2: found\n{module}:4: each\n"), process.stderr
