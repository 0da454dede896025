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
#: `finetune eval RUN --tasks NAMES --json`, then what the harness computes alone: its own model class loads base and
#: adapter, as `lm-eval run --model hf` does. In one process: the harness takes seconds to import.
BESIDE_ALONE = """
import json, sys
import lm_eval
from finetune.cli import main
from finetune.model.configuration import resolve_model_path
from finetune.planner.plan import read_plan
from finetune.run.directory import open_run
run, *tasks = sys.argv[1:]
sys.argv = ["finetune", "eval", run, "--tasks", ",".join(tasks), "--json"]
assert main() == 0
run, results = open_run(run), {}
base = resolve_model_path(read_plan(run.plan).settings)
arguments = {"pretrained": base, "tokenizer": str(run.data / "tokenizer"), "dtype": "float32"}
manager = lm_eval.tasks.TaskManager(include_defaults=False)  # the index of all tasks takes seconds
options = {"batch_size": 4, "device": "cpu", "bootstrap_iters": 0, "apply_chat_template": True, "task_manager": manager}
for model, adapter in (("base", {}), ("tuned", {"peft": str(run.adapter)})):
    results[model] = lm_eval.simple_evaluate("hf", arguments | adapter, tasks, **options)["results"]
print(json.dumps(results))
"""
#: `finetune eval RUN --tasks NAME` for each name.
ONE_BY_ONE = """
import sys
from finetune.cli import main
run, *names = sys.argv[1:]
for name in names:
    sys.argv = ["finetune", "eval", run, "--tasks", name]
    print(main())
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with lm-eval, and the libraries of the environment that runs the tests."""
    venv = tmp_path_factory.mktemp("harness") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{ROOT}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(venv / "bin" / "python"),
        "install",
        "-q",
        "--no-compile",
        "-c",
        str(ROOT / "constraints.txt"),
        "lm-eval",
    ]
    subprocess.run(command, check=True, capture_output=True)
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


def test_scores_are_those_of_the_harness_alone_and_are_kept(python, tasks, run):
    files = [str(tasks / "routes.yaml"), str(tasks / "queues.yaml")]
    ended = subprocess.run([python, "-c", BESIDE_ALONE, str(run.path), *files], capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    *printed, alone = ended.stdout.splitlines()
    results = json.loads(alone)
    scores = [from_json(TaskScore, values) for values in json.loads("".join(printed))["tasks"]]
    assert {(score.task, score.metric) for score in scores} == {
        ("routes", "exact_match"), ("queues", "acc"), ("queues", "acc_norm")
    }  # fmt: skip
    for score in scores:
        for model in ("base", "tuned"):
            assert getattr(score, model) == results[model][score.task][f"{score.metric},none"]
    assert len(list((run.path / "evaluations").glob("tasks-*.jsonl"))) == 2


def test_bad_tasks_are_refused_in_a_sentence_and_a_killed_evaluation_computes_what_is_missing(python, tasks, run):
    journals = {path: path.read_bytes() for path in (run.path / "evaluations").glob("tasks-*.jsonl")}
    for path, content in journals.items():
        path.write_bytes(content[: len(content) // 2])  # as a kill leaves it
    before = read_tasks(run)
    (tasks / "broken.yaml").write_text("task: [")
    command = [
        python,
        "-c",
        ONE_BY_ONE,
        str(run.path),
        "gsm8kk",
        *(str(tasks / name) for name in ("broken.yaml", "queues.yaml")),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert [ended.stdout.split()[number] for number in (0, 1, -1)] == ["2", "4", "0"], ended.stderr
    assert "queues" in ended.stdout and "95 % interval" in ended.stdout and "Traceback" not in ended.stderr
    assert sorted(read_tasks(run), key=str) == sorted(before, key=str)
    unknown, _, broken = " ".join(ended.stderr.split()).partition("similar: gsm8k")
    assert "can't be loaded" in broken and "can't be loaded" not in unknown


def test_without_the_harness_the_command_that_installs_it_is_said(finetune, run):
    code, shown = finetune("eval", run.path, "--tasks", "gsm8k")
    assert code == 2 and "pip install 'lm-eval" in shown
