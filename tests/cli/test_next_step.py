"""What a short answer says about the next step."""

import json
from dataclasses import replace

import pytest

from finetune.card import find_card
from finetune.cli.data import show_data
from finetune.cli.plan import next_command, show_plan
from finetune.cli.run import pause_run
from finetune.errors import RecipeError
from finetune.planner.plan import DataProblem, Plan, Suggestion, Verdict
from finetune.recipe import load_recipe
from finetune.run.directory import open_run
from finetune.units import GIB

GOOD = json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]})
BAD = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})
LONG = GOOD.replace("Hello", "Hello there " * 400)


def test_without_runs_a_shipped_recipe_is_named_and_of_a_data_file_how_to_read_it(tmp_path, monkeypatch, capsys):
    with pytest.raises(RecipeError) as raised:
        open_run("latest", tmp_path)
    load_recipe(raised.value.fix.split()[-1])
    (tmp_path / "rows.json").write_text('[{"instruction": "Say hi", "output": "hi"}]')
    with pytest.raises(RecipeError) as raised:
        load_recipe(str(tmp_path / "rows.json"))
    assert raised.value.fix == f"If it is data: finetune data tiny-cpu dataset.path={tmp_path / 'rows.json'}"
    monkeypatch.chdir(tmp_path)
    pause_run("latest", all_runs=True, as_json=False)
    assert capsys.readouterr().out == "No run is running.\n"


OPTIONS = {"model": None, "data": None, "gpu": "rtx-3060", "free": "8", "as_json": False}


@pytest.mark.slow
def test_a_plan_begins_with_its_verdict_and_a_lower_budget_and_ends_with_what_to_type_on_that_gpu(capsys, monkeypatch):
    show_plan("tiny-cpu", ["memory_budget=5"], **OPTIONS)
    shown = capsys.readouterr().out
    assert "on rtx-3060, 8.00 GiB free" in shown and "of 5.00 GiB it may use" in shown
    monkeypatch.setenv("COLUMNS", "80")
    code = show_plan("tiny-cpu", ["lora_r=4"], **OPTIONS)
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and max(map(len, lines)) <= 80
    assert lines[1].startswith("fits, with ") and lines[-1] == "Next on that machine: finetune run tiny-cpu lora_r=4 gpu=auto"
    show_plan("tiny-cpu", ["lora_r=4"], **OPTIONS, why=True)
    every = capsys.readouterr().out.splitlines()
    assert set(lines) - set(every) == {"All settings, other plans and reasons: add --why"} and "save_steps = 0" in every


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"verdict": Verdict.NO_FIT}, "Next: finetune plan r.yaml lora_r=4 gpu=rtx-3060 max_length=512"),
        ({"data_problem": DataProblem(("row 2",))}, ""),  # its fix is printed above
        ({"problem": "it is a CPU-only build", "problem_fix": "Install it."}, ""),
        ({"source": "measured"}, "Next: finetune run r.yaml lora_r=4 gpu=rtx-3060"),
        ({}, "Next on that machine: finetune run r.yaml lora_r=4 gpu=auto"),
    ],
)
def test_the_last_line_of_a_plan_is_about_what_comes_next(changes, end):
    plan = Plan(
        settings=None, reasons={}, card=find_card("rtx-3060"), verdict=Verdict.FITS, budget_bytes=8 * GIB,
        suggestions=(Suggestion("dtype=float16", GIB, 9 * GIB, ""), Suggestion("max_length=512", GIB, 7 * GIB, "")),
    )  # fmt: skip
    of_card = {name: changes[name] for name in ("problem", "problem_fix", "source") if name in changes}
    of_plan = {name: value for name, value in changes.items() if name not in of_card}
    plan = replace(plan, card=replace(plan.card, **of_card), **of_plan)
    assert next_command(plan, ["r.yaml"], ["lora_r=8", "lora_r=4", "gpu=rtx-3060"]) == end
    assert plan.exit_code == (4 if plan.data_problem else 3 if plan.verdict == Verdict.NO_FIT or plan.card.problem else 0)


@pytest.mark.parametrize(
    ("rows", "overrides", "code"),
    [
        ([GOOD, GOOD], [], 0),
        ([GOOD, BAD], [], 4),
        ([GOOD, BAD], ["dataset.on_bad_rows=skip"], 0),
        ([BAD], ["dataset.on_bad_rows=skip"], 4),
        ([GOOD, LONG], ["excess_length=raise"], 4),
        ([GOOD, LONG], ["excess_length=drop"], 0),
    ],
)
def test_data_that_a_run_would_refuse_ends_with_the_runs_exit_code(rows, overrides, code, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("".join(f"{row}\n" for row in rows))
    settings = [f"dataset.path={tmp_path / 'rows.jsonl'}", "dataset.test_split_size=0", *overrides]
    assert show_data("tiny-cpu", settings, as_json=False) == code
    shown = capsys.readouterr()
    assert ("The data needs a change" in shown.err and "Fix:" in shown.err) == (code == 4)
    assert ("First row as the model sees it" in shown.out) == (GOOD in rows)
    assert show_data("tiny-cpu", settings, as_json=True) == code
    assert bool(json.loads(capsys.readouterr().out)["data_problem"]) == (code == 4)


@pytest.mark.parametrize(
    ("arguments", "title"),
    [
        (["plan", "tiny-cpu", "--gpu", "1080"], "There is no such GPU"),
        (["plan", "tiny-cpu", "model_name_or_path=./nothing"], "The model can't be used"),
        (["plan", "tiny-cpu", "lora_r=x"], "The recipe needs a change"),
        *((["plan", "tiny-cpu", option, ""], "The recipe needs a change") for option in ("--gpu", "--model", "--data")),
        (["run", "tiny-cpu", "report_to=[no_such]"], "The recipe needs a change"),
        (["run", "tiny-cpu", "attn_implementation=flash_attention_2", "dtype=bfloat16"], "This machine lacks something"),
    ],
)
def test_the_title_of_an_error_names_what_is_wrong(arguments, title, finetune):
    code, shown = finetune(*arguments)
    assert code == 2 and title in shown.err.splitlines()
