"""Problems of the data are listed by kind; models are checked while somebody looks."""

import json

import pytest

from app.draft import Model
from app.pages.new_run import NewRun
from app.views.data import problems_of, source_text
from app.views.markup import render
from app.worker import SupersededError
from app.workspace import Workspace
from finetune.data.report import Refused

ROWS = [
    {"messages": [{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}]} for role in ("usr", "user", "usr")
]
ROLE = "unknown role 'usr'; did you mean user?"
REFUSED = [Refused("a.jsonl", 1, "messages[0].role", ROLE), Refused("a.jsonl", 3, "messages[0].role", ROLE),
           Refused("a.jsonl", 2, None, "=SUM(A1) is not JSON: Expecting value (at character 1)")]  # fmt: skip


@pytest.fixture
def workspace(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return Workspace(tmp_path, tmp_path / "runs")


def answer(refused=REFUSED):
    rows = [{"file": row.file, "row": row.row, "field": row.field, "reason": row.reason} for row in refused]
    return {"report": {"rows_refused": rows, "warnings": []}, "kinds": [row.kind for row in refused]}


def test_problems_are_counted_by_kind_and_say_what_was_meant(workspace):
    first, second = problems_of(answer())
    assert len(first.rows) == 2
    html = render("data_problems", problems=[first, second], total=3, are_left_out=False, warnings=[])
    assert "<b>2</b><span>unknown role &#x27;usr&#x27;; did you mean user?" in html
    assert "Leave all 3 out" in html and html.count(">Walk<") == 2
    assert source_text(workspace.root, first.rows[1]) == json.dumps(ROWS[2])


def test_buttons_of_the_data_panel_change_the_draft(workspace, context):
    context.planner.call = lambda method, **_: {"is_guess": False, "roles": {}} if method == "columns" else answer()
    page, draft = NewRun(context), context.draft
    chosen = [{"set": "dataset.test_split_size", "text": "0.05"}, {"set": "chat_template", "text": "plain"}]
    for action in ({"data": "a.jsonl"}, {"override": "dataset.on_bad_rows=skip"}, *chosen):
        assert page.change(action)["parts"]["refused"] == "", action
    dataset = draft.read().recipe.dataset
    assert dataset.path == "a.jsonl" and dataset.on_bad_rows == "skip" and dataset.test_split_size == 0.05
    assert draft.read().recipe.chat_template == "plain"


def test_models_are_checked_one_at_a_time_while_somebody_looks_until_the_drafts_plan_goes_first(context, monkeypatch):
    names, asked = ["one", "two", "three"], []

    def call(method, model, **_):
        if model == "four" and "four" not in names:
            raise SupersededError
        asked.append(model)
        return {"verdict": "fits", "peak_bytes": 2**30, "parameters": 10**9}

    context.planner.call, page = call, NewRun(context)
    monkeypatch.setattr("app.pages.new_run.local_models", lambda _: [Model(name, "folder") for name in [*names, "four"]])
    context.draft.change(model_name_or_path="two")
    assert "being checked" in page.panel("model") and asked == []
    shown = page.panel("model", check=True)
    assert asked == names and page.panel("model") == shown == page.panel("model", check=True) and asked == names
    assert shown.index(">being checked<") < shown.index(">one<") < shown.index(">four<")
    assert shown.count("Fits · 1.0B parameters · 1.0 GiB · folder") == 3 and shown.count('aria-pressed="true"') == 1
    names.append("four")
    shown = page.panel("model", check=True)
    assert shown.index(">Fits<") < shown.index(">one<") < shown.index(">four<") and "being checked" not in shown
