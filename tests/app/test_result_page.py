"""Result shows what a run has, and the choices of its forms become options of the command."""

import json
from types import SimpleNamespace

import pytest
from typer.main import get_command

from app.background import Task, task_of
from app.pages import run as run_page
from app.workspace import Workspace
from finetune.cli.app import cli
from finetune.evaluate.scorers import SCORES
from finetune.run.directory import RunDirectory


@pytest.fixture
def page(home, kept_run, monkeypatch):
    """The page's handlers with one run; `started` has the commands that were started."""
    run = RunDirectory(kept_run(home / "runs"))
    workspace, started = Workspace(home, home / "runs"), []
    monkeypatch.setattr(Task, "begin", lambda task, verb, run, *options: started.append([verb, *options[:-1]]))
    context = SimpleNamespace(workspace=workspace)

    def submit(task, **values):
        return run_page.RunPage(context).act(run.path.name, {"task": task, "values": values})["said"]

    return SimpleNamespace(run=run, context=context, started=started, submit=submit)


def write_scores(run, name, **more):
    model = {"exact_match": 0.5, "score": 0.5, "valid": None, "loss": 1.0, "perplexity": 2.7, "token_accuracy": 0.5,
             "fields": {}, "scores": [0.0, 1.0], "answers": ["a", "b"]}  # fmt: skip
    gap = {"value": 0.5, "low": 0.1, "high": 0.9, "more_rows": None}
    values = {"rows": 2, "base": model, "tuned": model, "prompts": ["p", "q"], "references": ["r", "s"], "seconds": 1.0,
              "score": "exact", "score_difference": gap, "exact_match_difference": gap, "loss_difference": gap, "data": None,
              "reused": 0, **more}  # fmt: skip
    (run.path / "evaluations").mkdir(exist_ok=True)
    (run.path / "evaluations" / f"scores-{name}.json").write_text(json.dumps(values))


def shown(page, part):
    tab = "answers" if part in ("evaluations", "reports") else "use"
    return run_page.result_parts(page.context, page.run, tab, "differ")[part]


def done(page, verb, values):
    task = task_of(page.context.workspace, page.run, verb)
    task.path.mkdir(parents=True)
    (task.path / "status.json").write_text(json.dumps({"state": "done", "command": f"finetune {verb}"}))
    (task.path / "output.txt").write_text(json.dumps(values) + "\n")


def test_evaluations_of_the_command_line_are_shown_and_damaged_ones_named(page):
    assert "Not evaluated yet" in shown(page, "evaluations")
    write_scores(page.run, "exact")
    write_scores(page.run, "exact-pairs", against_adapter=True)
    forgetting = {"rows": 60, "before": 2.0, "now": 2.5, "difference": None}
    (page.run.path / "evaluations" / "lost.json").write_text(json.dumps(forgetting))
    scores = shown(page, "evaluations")
    assert ">now<" in scores and "+50 points (95" in scores
    assert "general questions" in scores and scores.count("<details>") == 1 and "Not evaluated" not in scores
    assert 'aria-label="wrong">✕' in scores and 'aria-label="right">✓' in scores
    write_scores(page.run, "json", prompts=[])
    (page.run.path / "evaluations" / "scores-torn.json").write_text('{"rows": 4, ')
    assert "scores-json.json, scores-torn.json can&#x27;t be read" in shown(page, "evaluations")


def test_an_export_to_gguf_says_what_llama_cpp_answered_and_a_line_separator_does_not_cut_an_answer(page):
    done(page, "eval", {})
    task = task_of(page.context.workspace, page.run, "eval")
    (task.path / "output.txt").write_text(json.dumps({"answers": ["a\u2028b"]}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert task.result() == {"answers": ["a\u2028b"]}
    assert "Not run yet" in shown(page, "exported")
    page.submit("export", type="q8_0", to="on")
    assert page.started == [["export", "--type=q8_0", "--to=gguf-adapter"]]
    done(page, "export", {"file": "runs/x.gguf", "adapter": None, "modelfile": "runs/Modelfile",
                          "check": {"rows": 120, "same_answers": 119}})  # fmt: skip
    exported = shown(page, "exported")
    assert "answer to 119 of 120 prompts" in exported and "runs/Modelfile" in exported and "adapter</td>" not in exported


def test_a_report_can_be_downloaded_once_it_is_written(page):
    assert "Not written yet" in shown(page, "reports")
    (page.run.path / "report.html").write_text("<html>")
    assert 'href="/ft/report/finished/report.html" download' in shown(page, "reports")
    assert "Choose the runs" in page.submit("compare", others="../x") and page.started == []
    assert page.submit("report") == "" and page.started == [["report"]]


CHOSEN = {"score": "", "pattern": "", "tolerance": "", "data": "", "rows": ""}


def test_every_score_but_a_function_can_be_chosen_and_another_starts_nothing(page):
    assert set(run_page.SCORES) == {"", *SCORES}
    assert "ft-problem" in page.submit("eval", **CHOSEN | {"score": "mine.py:score"}) and page.started == []


@pytest.mark.parametrize(
    ("chosen", "read"),
    [({}, {"score": None, "data": None, "rows": None}),
     ({"score": "regex", "pattern": "--json", "data": "-x.jsonl", "rows": "20"},
      {"score": "regex", "pattern": "--json", "data": "-x.jsonl", "rows": 20, "as_json": False}),
     ({"score": "numeric", "pattern": "ignored", "tolerance": "0.01", "rows": ""},
      {"score": "numeric", "tolerance": 0.01, "pattern": None})],
)  # fmt: skip
def test_choices_become_options(page, chosen, read):
    assert page.submit("eval", **CHOSEN | chosen) == ""
    options = get_command(cli).commands["eval"].make_context("eval", ["latest", *page.started[0][1:]]).params
    assert {name: options[name] for name in read} == read
