"""The notebook for a free T4: its cells run in order, with the bundled model on the CPU in place of 7B on the GPU."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = json.loads((ROOT / "docs" / "free-t4.ipynb").read_text())
CODE = [
    (set(cell["metadata"].get("tags", ())), "".join(cell["source"]))
    for cell in NOTEBOOK["cells"]
    if cell["cell_type"] == "code"
]
#: The bundled model and three steps.
ON_A_CPU = {"RECIPE": "tiny-cpu", "SETTINGS": "max_steps=3 save_steps=3 eval_steps=3"}


def test_cells_are_without_output_and_have_ids_of_their_own():
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids) and NOTEBOOK["nbformat"] == 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in NOTEBOOK["cells"] if "outputs" in cell)
    assert [source for tags, source in CODE if "install" in tags] == ["%pip install -q -c constraints.txt ."]


@pytest.mark.slow
def test_the_cells_run(tmp_path, monkeypatch, warm_python):
    monkeypatch.chdir(tmp_path)
    command = tmp_path / "bin" / "finetune"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {warm_python} -m finetune "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    names, printed = {}, ""
    for tags, source in CODE:
        if source.startswith("!"):
            line = re.sub(r"\{(\w+)\}", lambda name: names[name[1]], source[1:])
            ended = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)
            assert ended.returncode in ((0, 1) if "may-fail" in tags else (0,)), f"{line}\n{ended.stdout}\n{ended.stderr}"
            printed += ended.stdout
        elif "install" not in tags:
            exec(source, names)  # noqa: S102  # a cell of the notebook
            names.update(ON_A_CPU)
    assert len(names["losses"]) == 3 and "exact match" in printed and Path("report.html").is_file()
