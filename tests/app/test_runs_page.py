"""The list of runs and sweeps, what its buttons do, and a sweep's page, with its arms over each other."""

import json
from dataclasses import asdict

import pytest
from written_runs import append, make_run, make_sweep, step, steps

from app.page import HTML_OF_COMPONENT, complete
from app.pages.run import RunPage
from app.pages.runs import RunsPage
from app.report import main as report_main
from app.views.runs import row_of
from app.web.followed import attempted, changed_parts
from finetune.evaluate.results import Comparison, Score
from finetune.events import Evaluation, Result, State
from finetune.files import write_json

ENDED = [Evaluation(step=20, eval_loss=0.5, eval_s=1.0), Result(step=20, eval_loss=0.5), State(state="finished", exit_code=0)]


@pytest.fixture
def context(context):
    for name in ("first", "second"):
        make_run(context.workspace.runs, name, [*steps(1, 20), *ENDED])
    return context


def acted(context, **message):
    return attempted(RunsPage(context).act, message)["said"]


def scored(run, base=0.0, tuned=0.97):
    (run.path / "evaluations").mkdir(exist_ok=True)
    models = [Score(share, 1.0, ["a"], scores=[share], score=share) for share in (base, tuned)]
    write_json(run.path / "evaluations" / "scores-exact.json", asdict(Comparison(1, *models, ["p"], ["r"], 1.0)))


def test_a_row_has_loss_score_peak_beside_forecast_and_time_and_a_comparison_settings_that_differ_and_scores(context):
    run = context.workspace.run("first")
    scored(run)
    row = row_of(context.lives.follow(run))
    assert (row["held_out"], row["score"], row["time"], row["steps"]) == ("0.500", "EM 0 → 97 %", "10 s", "20 of 1,000")
    assert row["peak"] == "11.5 / 12.0"  # reserved and the CUDA context, beside the forecast of both
    scored(context.workspace.run("second"))
    path = context.workspace.run("second").plan
    plan = json.loads(path.read_text())
    path.write_text(json.dumps({**plan, "plan": {**plan["plan"], "lora_r": 77}}))
    html = RunsPage(context).act({"deed": "compare", "runs": ["first", "second"]})["compared"]
    assert "LoRA rank" in html and ">77<" in html and "EM 0 → 97 %" in html and "Weight decay" not in html
    assert "two runs or more" in RunsPage(context).act({"deed": "compare", "runs": ["first"]})["compared"]


def test_deleted_runs_are_moved_and_the_answer_says_where(context):
    answer = acted(context, deed="delete", runs=["first", "second"])
    assert context.workspace.list_runs() == [] and answer.count("To restore it, move ") == 2
    folders = list((context.workspace.runs / ".trash").iterdir())
    assert len(folders) == 2 and all(str(folder) in answer for folder in folders)


def test_a_run_is_renamed_and_its_recipe_duplicated(context):
    assert "is now called third" in acted(context, deed="rename", runs=["first"], name="third")
    assert "not a valid run name" in acted(context, deed="rename", runs=["second"], name="../x")
    context.workspace.run("third").recipe.write_text("model_name_or_path: tiny\ndataset: support\n")
    assert 'data-go="/"' in acted(context, deed="duplicate", runs=["third"])
    assert context.draft.read().model == "tiny" and context.draft.read().data == "support"


def test_a_damaged_run_is_named_and_hides_no_other(context):
    context.workspace.run("first").plan.write_text("{")
    shown = RunsPage(context).parts()["list"]
    assert "first/plan.json can&#x27;t be read" in shown and 'data-run="second"' in shown
    page = RunPage(context).html({"run": "first"})
    assert ">first</h1>" in page and "can&#x27;t be read" in page


def test_a_page_that_can_not_be_made_says_why(monkeypatch):
    monkeypatch.setitem(HTML_OF_COMPONENT, "first-html-999", lambda _query: int("damaged"))
    assert b"damaged" in complete(b'{"type": "html", "props": {"value": "first-html-999"}}', "/runs", {})


def test_a_page_sends_the_parts_that_have_changed(context):
    page = RunsPage(context)
    shown = ".".join(stamp for stamp, _ in changed_parts(page.parts(), "").values())
    assert changed_parts(page.parts(), shown) == {}
    append(context.workspace.run("first"), step(21))
    context.lives.follow(context.workspace.run("first")).refresh()
    assert changed_parts(page.parts(), shown).keys() == {"list"}


@pytest.fixture
def swept(context):
    make_sweep(context.workspace.runs, "rates")
    return context


def test_a_sweep_is_a_line_of_its_own_with_a_page_of_its_arms_which_are_no_runs_of_the_list(swept):
    assert {run.path.name for run in swept.workspace.list_runs()} == {"first", "second"}
    line = RunsPage(swept).parts()["sweeps"]
    assert 'href="/run?run=rates"' in line and "Learning rate 0.0004 wins with a held-out loss of 0.5000" in line
    assert "clearly behind: Learning rate 0.0001, by 0.4000" in line
    shown_page = RunPage(swept).html({"run": "rates"})
    assert "above the median of the finished arms" in shown_page
    assert "rates-1" in shown_page and "rates-2" in shown_page
    changed = RunPage(swept).changed("rates", tab="overview")
    arms = changed["parts"]["arms"][1]
    assert arms in shown_page and not changed["alive"]
    assert arms.index('href="/run?run=rates-2"') < arms.index('href="/run?run=rates-1"')


def test_the_report_of_a_sweep_has_the_curves_of_its_arms_and_each_arm_is_opened_by_its_name(swept, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path / "report.html"), str(swept.workspace.runs / "rates")])
    assert report_main() == 0
    page = (tmp_path / "report.html").read_text()
    assert "Learning rate 0.0004 wins with a held-out loss of 0.5000" in page and page.count("<polyline") == 2
    assert "<script" not in page
    assert swept.workspace.run("rates-1").path == swept.workspace.runs / "rates" / "rates-1"
    assert swept.workspace.run("rates") is None and swept.workspace.sweep("../runs/rates") is None
    (swept.workspace.runs / "rates" / "study.journal").write_text("{}\n")
    assert swept.workspace.sweep("rates") is None and swept.workspace.list_sweeps() == []
