"""Command line, its JSON and the page: the same recipe gets the same verdict, the same words and the same exit code."""

import contextlib
import io
import json
import random
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "planner"))
from arithmetic_forecast import ArithmeticForecaster

from app.planning import Questions
from app.worker import Work, call_method
from finetune.bundled import dataset_paths
from finetune.cli import main
from finetune.memory.device_peak import make_forecast

pytestmark = pytest.mark.slow
MODELS = ["tiny", "HuggingFaceTB/SmolLM2-135M-Instruct", "nobody/nothing", "no/such/folder"]
CHOICES = {
    "model_name_or_path": [*MODELS[:2], *MODELS], "gpu": ["cpu", "rtx-3060", "t4", "rtx-4090", "voodoo-2"],
    "dataset": ["rows.jsonl", "bad.jsonl", "missing.jsonl", "{path: rows.jsonl, max_rows: 40}"],
    "max_length": ["64", "128", "2048", "4"], "excess_length": ["drop", "raise", "truncate"], "lora_r": ["8", "64", "0"],
    "load_in_4bit": ["true", "false"], "load_in_8bit": ["true", "false"], "effective_batch_size": ["1", "3", "8", "16"],
    "per_device_train_batch_size": ["1", "2"], "gradient_accumulation_steps": ["1", "4"],
    "memory_budget": ["400MiB", "2GiB", "9000GiB", "much"], "activation_checkpointing": ["true", "offload", "selective"],
    "torch_compile": ["true"], "optim": ["adamw_8bit", "adafactor", "sgd"],
    "launch": [
        "{num_processes: 3, num_machines: 2}", "{num_processes: 2, num_machines: 2}", "{strategy: fsdp}",
        "{num_processes: 2}", "{num_processes: 2, strategy: fsdp}", "{offload: cpu}", "{num_processes: 2, machine_rank: 3}",
    ],
}  # fmt: skip
#: Refused by one door and planned by another once.
ONCE = [
    {"model_name_or_path": "tiny", "dataset": "rows.jsonl", "launch": "{num_processes: 3, num_machines: 2}"},
    {"model_name_or_path": "tiny", "dataset": "rows.jsonl", "gpu": "cpu", "max_length": "64"},
]


def generated(count):
    chance = random.Random(0)
    for _ in range(count):
        names = ["model_name_or_path", "dataset", "gpu", *chance.sample(sorted(CHOICES), chance.choice([0, 1, 1, 2, 3]))]
        yield {name: chance.choice(CHOICES[name]) for name in dict.fromkeys(names)}


RECIPES = [*ONCE, *generated(38)]


def run(*arguments):
    """The command in this process: exit code, standard output, standard error."""
    output, wrong, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["finetune", *arguments]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(wrong):
            return main(), output.getvalue(), wrong.getvalue()
    finally:
        sys.argv = argv


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doors")
    shutil.copy(dataset_paths("support")["train"], folder / "rows.jsonl")
    (folder / "bad.jsonl").write_text((folder / "rows.jsonl").read_text() + '{"messages": []}\n')
    return folder


def plain(text):
    """Without the line breaks and styles of a terminal."""
    return "".join(text.split())


@pytest.mark.parametrize(
    ("recipes", "forecaster"),
    [(RECIPES, ArithmeticForecaster()), (RECIPES[1::10], make_forecast)],
    ids=["forecast by arithmetic", "forecast by the dry run"],
)
def test_recipes_get_one_answer_from_every_door(workspace, monkeypatch, recipes, forecaster):
    monkeypatch.setattr("finetune.planner.planner.make_forecast", forecaster)
    page = Questions()
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("COLUMNS", "400")
    for values in recipes:
        text = "".join(f"{name}: {value}\n" for name, value in values.items())
        Path("recipe").write_text(text)
        code, output, _ = run("plan", "recipe", "--json")
        answer = json.loads(output)
        asked = call_method(page, "plan", {"recipe": text, "compare": True}, Work())
        shown_code, shown, wrong = run("plan", "recipe")
        assert shown_code == code, text
        if "verdict" in answer:
            assert _without_free_memory(asked["result"]) == _without_free_memory(answer), text
            assert plain(answer["verdict"]) in plain(shown)
            problems = (answer["data_problem"] or {"problems": []})["problems"]
            assert code == (4 if problems else 3 if answer["verdict"] == "does not fit" else 0)
        else:
            problems = answer["problems"]
            refused = asked["error"]
            assert (refused["problems"], refused["fix"], refused["exit_code"]) == (problems, answer["fix"], code), text
        assert all(plain(line) in plain(shown + wrong) for line in problems), text


def _without_free_memory(plan):
    """A processor's free memory changes while one asks."""
    if plan["card"]["source"] != "cpu":
        return plan
    return {name: plan[name] for name in ("verdict", "data", "data_problem", "suggestions", "total_steps")}
