"""The form edits a recipe: text and form agree, remote code stays off. Problems of the data are listed; models are checked."""

import json

import pytest

from app.background import Task, start_run, starts
from app.draft import Draft, Model
from app.pages.new_run import NewRun
from app.views.data import problems_of, source_text
from app.views.markup import render
from app.views.new_run import fields
from app.worker import SupersededError
from app.workspace import Workspace
from finetune.data.report import Refused
from finetune.errors import RecipeError
from finetune.recipe import find_recipe, load_recipe
from finetune.run.control import rename_run
from finetune.run.directory import RunDirectory


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path, tmp_path / "runs")


@pytest.fixture
def draft(workspace):
    return Draft(workspace)


@pytest.mark.slow
@pytest.mark.parametrize("field", fields(), ids=lambda field: field.name)
def test_showing_a_field_and_taking_it_back_changes_nothing(draft, field):
    before = draft.write(find_recipe("tiny-cpu").read_text())
    after = draft.change(**field.change(field.text(before)))
    assert after.recipe.model_dump() == before.recipe.model_dump()


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("lora_r", "32", 32), ("learning_rate", "1e-4", 1e-4), ("use_dora", "true", True), ("seed", "7", 7),
        ("target_modules", "[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("activation_checkpointing", "selective", "selective"),
    ],
)  # fmt: skip
def test_what_is_typed_becomes_the_value_that_yaml_would_give(draft, name, text, value):
    field = next(field for field in fields() if field.name == name)
    edited = draft.change(**field.change(text))
    assert getattr(edited.recipe, name) == value
    assert field.text(draft.read()) in (text, str(value).lower(), '["q_proj", "v_proj"]', "0.0001")


def test_unsetting_a_nested_setting_keeps_its_siblings_and_a_draft_of_another_version_is_none(draft, workspace):
    draft.change(dataset__path="support", dataset__max_rows=40)
    assert draft.change(dataset__max_rows=None).values == {"dataset": {"path": "support"}}
    draft.change(lora_r=8)
    (workspace.folder("draft") / "draft.json").write_text('{"values": {"a_key_that_left": 1}}')
    assert draft.read().values == {}


def test_remote_code_can_not_be_switched_on_in_any_way(draft):
    text = draft.write(find_recipe("tiny-cpu").read_text()).text
    pinned = f"trust_remote_code: true\nmodel_revision: {'a' * 40}\n"
    with pytest.raises(RecipeError):
        draft.change(trust_remote_code=True)
    with pytest.raises(RecipeError, match="own code"):
        draft.change(model_revision="a" * 40, trust_remote_code=True)
    with pytest.raises(RecipeError, match="own code"):
        draft.apply(f"model_revision={'a' * 40} trust_remote_code=true")
    with pytest.raises(RecipeError, match="own code"):
        draft.write(text + pinned)
    assert draft.read().recipe.trust_remote_code is False


@pytest.mark.parametrize("name", ["..", ".", "", None, "../x", "/etc", "a/b", ".app", ".trash", "link", "\x00"])
def test_a_run_name_never_leads_out_of_the_folder(workspace, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "plan.json").write_text("{}")
    workspace.runs.mkdir()
    (workspace.runs / "link").symlink_to(outside)
    assert workspace.run(name) is None
    assert workspace.list_runs() == []


@pytest.mark.parametrize("name", ["..", "a/b", ".hidden", "", "x" * 101, "a\nb", "-rf", "<b>", "two"])
def test_a_run_is_not_renamed_to_an_invalid_or_a_taken_name(workspace, name):
    some_run(workspace, "two")
    with pytest.raises(RecipeError):
        rename_run(some_run(workspace), name)


def test_starts_are_files_wait_for_earlier_ones_and_can_be_taken_back(workspace, monkeypatch):
    commands = []
    monkeypatch.setattr(Task, "begin", lambda task, *arguments, module: commands.append([module, *arguments]))
    monkeypatch.setattr(Task, "status", lambda task: {"state": "running"})
    first, second = (start_run(workspace, load_recipe("tiny-cpu", [f"seed={seed}"])) for seed in (1, 2))
    assert [load_recipe(start.path / "recipe.yaml").seed for start in starts(workspace)] == [1, 2]
    assert commands[0][:4] == ["app.background", str(workspace.runs), str(first.path), "run"]
    assert (first.reason_to_wait(workspace), second.reason_to_wait(workspace)) == ("", "starts after an earlier one")
    assert first.view()["state"] == "waiting" and first.cancel() and not first.cancel()
    assert starts(workspace) == [second] and second.reason_to_wait(workspace) == ""


def some_run(workspace, name="one"):
    path = workspace.runs / name
    path.mkdir(parents=True)
    (path / "plan.json").write_text("{}")
    return RunDirectory(path)


ROWS = [
    {"messages": [{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}]} for role in ("usr", "user", "usr")
]
ROLE = "unknown role 'usr'; did you mean user?"
REFUSED = [Refused("a.jsonl", 1, "messages[0].role", ROLE), Refused("a.jsonl", 3, "messages[0].role", ROLE),
           Refused("a.jsonl", 2, None, "=SUM(A1) is not JSON: Expecting value (at character 1)")]  # fmt: skip


def answer(refused=REFUSED):
    rows = [{"file": row.file, "row": row.row, "field": row.field, "reason": row.reason} for row in refused]
    return {"report": {"rows_refused": rows, "warnings": []}, "kinds": [row.kind for row in refused]}


def test_problems_are_counted_by_kind_and_say_what_was_meant(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    first, second = problems_of(answer())
    assert len(first.rows) == 2
    html = render("data_problems", problems=[first, second], total=3, are_left_out=False, warnings=[])
    assert "<b>2</b><span>unknown role &#x27;usr&#x27;; did you mean user?" in html
    assert "Leave all 3 out" in html and html.count(">Walk<") == 2
    assert source_text(tmp_path, first.rows[1]) == json.dumps(ROWS[2])


def test_buttons_of_the_data_panel_change_the_draft(context):
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
