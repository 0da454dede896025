"""Functions of docs/scores.md score, job files have recipes and shell that are read, and cells of the notebook for a T4 run."""

import http.server
import json
import os
import re
import sqlite3
import subprocess
import threading
from pathlib import Path

import pytest
from doc_pages import ROOT, fences

from finetune.evaluate.scorers import scorer
from finetune.recipe import parse_recipe, yaml


@pytest.fixture
def score(tmp_path, monkeypatch):
    """score(function, prompt, expected, answer), with the page's code in the working folder."""
    monkeypatch.chdir(tmp_path)
    (page,) = fences(ROOT / "docs" / "scores.md", "python")
    (tmp_path / "scores.py").write_text(page.text)
    return lambda name, *texts: scorer(f"scores.py:{name}").score_answer(*texts).score


def test_sql_compares_rows_and_writes_nothing(score):
    with sqlite3.connect("shop.db") as database:
        database.executescript("create table parcels (id, city); insert into parcels values (1, 'Bern'), (2, 'Basel');")
    expected = "select city from parcels"
    assert score("sql", "", expected, "```sql\nSELECT city FROM parcels ORDER BY 1\n```") == 1
    assert score("sql", "", expected, "select id from parcels") == score("sql", "", expected, "drop table parcels") == 0
    assert score("sql", "", expected, expected) == 1


@pytest.mark.sandbox
def test_code_passes_the_tests_of_its_prompt_in_a_sandbox(score, tmp_path):
    (tmp_path / "tests.jsonl").write_text(json.dumps({"prompt": "double", "tests": "assert f(2) == 4"}))
    assert score("code", "double", "", "```python\ndef f(x):\n    return 2 * x\n```") == 1
    assert score("code", "double", "", "def f(x): return x") == score("code", "double", "", "def f(x:") == 0
    reads, writes = f"open({str(tmp_path / 'tests.jsonl')!r})\n", f"open({str(tmp_path / 'new')!r}, 'w')\n"
    for code in ("print('passed'); raise SystemExit", *(f"{reaches}def f(x): return 2 * x" for reaches in (reads, writes))):
        assert score("code", "double", "", code) == 0, code


def test_a_judge_grades(score, monkeypatch):
    class Judge(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
            self.send_response(200)
            self.end_headers()
            message = {"content": "7" if "Answer: good" in asked else "0"}
            self.wfile.write(json.dumps({"choices": [{"message": message}]}).encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("JUDGE_MODEL", "judge")
        assert (score("judge", "q", "e", "good"), score("judge", "q", "e", "bad")) == (0.7, 0)
        server.shutdown()


def test_job_files_have_a_recipe_and_shell_without_errors():
    jobs = {path.name: path.read_text("utf-8") for path in (ROOT / "docs" / "jobs").iterdir()}
    config, job = jobs["kubernetes.yaml"].split("---\n")
    sky = yaml.parse(jobs["skypilot.yaml"], "skypilot.yaml").values
    container = yaml.parse(job, "kubernetes.yaml").values["spec"]["template"]["spec"]["containers"][0]
    recipes = {"kubernetes": yaml.parse(config, "kubernetes.yaml").values["data"]["recipe.yaml"]}
    for name, text in (("sky", sky["setup"]), ("slurm", jobs["slurm.sbatch"])):
        recipes[name] = text.split("<<'RECIPE'\n")[1].split("RECIPE\n")[0]
    processes = {name: parse_recipe(text, name).launch.num_processes for name, text in recipes.items()}
    assert processes == {"kubernetes": container["resources"]["limits"]["nvidia.com/gpu"], "sky": 4, "slurm": 8}
    for script in (sky["setup"], sky["run"], container["command"][-1], jobs["slurm.sbatch"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


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
