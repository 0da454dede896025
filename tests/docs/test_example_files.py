"""The functions of docs/scores.md score, and the job files of docs/jobs have recipes and shell that are read."""

import http.server
import json
import sqlite3
import subprocess
import threading

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
