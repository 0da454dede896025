"""Benchmark tasks of lm-evaluation-harness, in an environment of its own: it brings thirty packages that nothing else needs."""

import json
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from finetune.evaluate.results import TaskScore, read_tasks
from finetune.run.directory import RunDirectory
from finetune.serialise import from_json

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
QUEUES = ["shipping", "returns", "billing", "technical", "account", "sales"]
#: `finetune eval RUN --tasks NAMES --json`; what the harness computes alone, whose own model class loads base and adapter as
#: `lm-eval run --model hf` does; and after a kill `finetune eval RUN --tasks NAME` for a wrong name, a broken file and a task.
#: In one process: the harness takes seconds to import.
COMMANDS = """
import json, sys
import lm_eval
from finetune.cli import main
from finetune.model.configuration import resolve_model_path
from finetune.planner.plan import read_plan
from finetune.run.directory import open_run
run, broken, *tasks = sys.argv[1:]
sys.argv = ["finetune", "eval", run, "--tasks", ",".join(tasks), "--json"]
assert main() == 0
folder, run, results = run, open_run(run), {}
base = resolve_model_path(read_plan(run.plan).settings)
arguments = {"pretrained": base, "tokenizer": str(run.data / "tokenizer"), "dtype": "float32"}
manager = lm_eval.tasks.TaskManager(include_defaults=False)  # the index of all tasks takes seconds
options = {"batch_size": 4, "device": "cpu", "bootstrap_iters": 0, "apply_chat_template": True, "task_manager": manager}
for model, adapter in (("base", {}), ("tuned", {"peft": str(run.adapter)})):
    results[model] = lm_eval.simple_evaluate("hf", arguments | adapter, tasks, **options)["results"]
print("ALONE", json.dumps(results), "ALONE")
for journal in (run.path / "evaluations").glob("tasks-*.jsonl"):
    journal.write_bytes(journal.read_bytes()[: journal.stat().st_size // 2])  # as a kill leaves it
for name in ("gsm8kk", broken, tasks[-1]):
    sys.argv = ["finetune", "eval", folder, "--tasks", name]
    print("EXIT", main())
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with lm-eval, and the libraries of the environment that runs the tests."""
    venv = tmp_path_factory.mktemp("harness") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{ROOT}\n")
    install = ["-m", "pip", "--python", str(venv / "bin" / "python"), "install", "-q", "--no-compile", "lm-eval"]
    subprocess.run([sys.executable, *install, "-c", str(ROOT / "constraints.txt")], check=True, capture_output=True)
    return venv / "bin" / "python"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Two tasks on six bundled rows: answers, and choices."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [json.loads(line) for line in (ROOT / "finetune/bundled/support/eval.jsonl").read_text().splitlines()[:6]]
    texts = [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in rows]
    lines = [
        json.dumps({"question": question, "answer": answer, "queue": QUEUES.index(json.loads(answer)["queue"])})
        for question, answer in texts
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    common = f"""
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
        test_split: test
        doc_to_text: "{{{{question}}}}"
    """
    answers = """
        task: routes
        output_type: generate_until
        doc_to_target: "{{answer}}"
        generation_kwargs: {until: ["\\n"], do_sample: false, max_gen_toks: 48}
        metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
    """
    choices = f"""
        task: queues
        output_type: multiple_choice
        doc_to_target: queue
        doc_to_choice: {json.dumps(['{"queue": "' + queue for queue in QUEUES])}
        metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}, {{metric: acc_norm, higher_is_better: true}}]
    """
    for name, text in (("routes", answers), ("queues", choices)):
        (folder / f"{name}.yaml").write_text(textwrap.dedent(common) + textwrap.dedent(text))
    return folder


@pytest.fixture(scope="module")
def run(kept_run, tmp_path_factory):
    return RunDirectory(kept_run(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def ended(python, tasks, run):
    (tasks / "broken.yaml").write_text("task: [")
    files = [str(tasks / name) for name in ("broken.yaml", "routes.yaml", "queues.yaml")]
    process = subprocess.run([python, "-c", COMMANDS, str(run.path), *files], capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stderr
    return process


def first_scores(ended):
    return [from_json(TaskScore, values) for values in json.loads(ended.stdout.partition("ALONE")[0])["tasks"]]


def test_scores_are_those_of_the_harness_alone_and_are_kept(ended, run):
    results, scores = json.loads(ended.stdout.split("ALONE")[1]), first_scores(ended)
    assert {(score.task, score.metric) for score in scores} == {
        ("routes", "exact_match"), ("queues", "acc"), ("queues", "acc_norm")
    }  # fmt: skip
    for score in scores:
        for model in ("base", "tuned"):
            assert getattr(score, model) == results[model][score.task][f"{score.metric},none"]
    assert len(list((run.path / "evaluations").glob("tasks-*.jsonl"))) == 2


def test_bad_tasks_are_refused_in_a_sentence_and_a_killed_evaluation_computes_what_is_missing(ended, run):
    printed = ended.stdout.split("ALONE")[2]
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("EXIT")] == ["2", "4", "0"], ended.stderr
    assert "queues" in printed and "95 % interval" in printed and "Traceback" not in ended.stderr
    assert sorted(read_tasks(run), key=str) == sorted(first_scores(ended), key=str)
    unknown, _, broken = " ".join(ended.stderr.split()).partition("similar: gsm8k")
    assert "can't be loaded" in broken and "can't be loaded" not in unknown


def test_without_the_harness_the_command_that_installs_it_is_said(finetune, run):
    code, shown = finetune("eval", run.path, "--tasks", "gsm8k")
    assert code == 2 and "pip install 'lm-eval" in shown
