"""The list of runs, what its buttons do, and Home, which shows the newest of them."""

import json
from dataclasses import asdict

import pytest
from written_runs import append, make_run, step, steps

from app.page import HTML_OF_COMPONENT, complete
from app.pages.run import RunPage
from app.pages.runs import RunsPage
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
