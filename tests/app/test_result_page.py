"""Result shows what a run has, whoever made it, and pushes only what a dry run has listed."""

import json
import time
from types import SimpleNamespace

import pytest

from app.background.tasks import Tasks
from app.pages.result import _View
from app.views.options import HELD_OUT_BEFORE
from app.workspace import Workspace
from finetune.run import base_adapter
from finetune.run.directory import RunDirectory

REPO = "alice/support-lora"


@pytest.fixture
def page(home, kept_run):
    """The page's handlers with one run; `started` has the commands that were started."""
    run = RunDirectory(kept_run(home / "runs"))
    workspace, started = Workspace(home, home / "runs"), []
    tasks = Tasks(workspace)
    tasks.start = lambda run, verb, options: started.append([verb, *options])
    view = _View(SimpleNamespace(workspace=workspace, tasks=tasks))
    return SimpleNamespace(run=run, view=view, tasks=tasks, started=started)


def write_scores(run, name, **more):
    model = {"exact_match": 0.5, "score": 0.5, "valid": None, "loss": 1.0, "perplexity": 2.7, "token_accuracy": 0.5,
             "fields": {}, "scores": [0.0, 1.0], "answers": ["a", "b"]}  # fmt: skip
    gap = {"value": 0.5, "low": 0.1, "high": 0.9, "more_rows": None}
    values = {"rows": 2, "base": model, "tuned": model, "prompts": ["p", "q"], "references": ["r", "s"], "seconds": 1.0,
              "score": "exact", "score_difference": gap, "exact_match_difference": gap, "loss_difference": gap, "data": None,
              "reused": 0, **more}  # fmt: skip
    (run.path / "evaluations").mkdir(exist_ok=True)
    (run.path / "evaluations" / f"scores-{name}.json").write_text(json.dumps(values))


def shown(page):
    return page.view.show("finished", "Differing first")


def done(page, verb, values):
    task = page.tasks.of(page.run, verb)
    task.path.mkdir(parents=True)
    (task.path / "status.json").write_text(json.dumps({"state": "done", "command": f"finetune {verb}"}))
    (task.path / "output.txt").write_text(json.dumps(values) + "\n")


def test_evaluations_of_the_command_line_are_shown(page):
    assert "Not evaluated yet" in shown(page)[0]
    write_scores(page.run, "exact")
    write_scores(page.run, "exact-forgetting", forgetting=True)
    group = {"rows_of": "general questions", "rows": 60, "before": 2.0, "now": 2.5, "difference": None}
    (page.run.path / "evaluations" / "lost.json").write_text(json.dumps({"groups": [group]}))
    scores = shown(page)[0]
    assert "held-out rows of the run it continued" in scores and ">now<" in scores and "+50 points (95" in scores
    assert "general questions" in scores and scores.count("<details>") == 1 and "Not evaluated" not in scores


def test_a_damaged_evaluation_is_named_beside_the_others(page):
    write_scores(page.run, "exact")
    write_scores(page.run, "json", prompts=[])
    (page.run.path / "evaluations" / "scores-torn.json").write_text('{"rows": 4, ')
    assert "scores-json.json, scores-torn.json can&#x27;t be read" in shown(page)[0]


def test_an_answer_with_a_line_separator_does_not_cut_what_a_task_has_printed(page):
    done(page, "eval", {})
    task = page.tasks.of(page.run, "eval")
    (task.path / "output.txt").write_text(json.dumps({"answers": ["a\u2028b"]}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert task.result() == {"answers": ["a\u2028b"]}


def test_a_report_can_be_downloaded_once_it_is_written(page):
    assert "Not written yet" in shown(page)[1]
    (page.run.path / "report.html").write_text("<html>")
    assert 'href="/ft/report/finished/report.html" download' in shown(page)[1]
    assert page.view.compare("finished", ["../x"]) != "" and page.started == []
    page.view.report("finished")
    assert page.started == [["report"]]


def test_only_what_a_dry_run_has_listed_is_pushed(page):
    assert "Dry run" in page.view.push("finished", REPO, "Adapter", False) and page.started == []
    for name in ("", "--public", "no repo", "a/b/c"):
        assert "OWNER/NAME" in page.view.dry_run("finished", name, "Adapter", False)
    page.view.dry_run("finished", REPO, "Adapter", False)
    assert page.started == [["push", REPO, "--adapter", "--dry-run"]]
    listed = {"repo": REPO, "kind": "adapter", "public": False, "sent": False, "files": [{"name": "README.md", "bytes": 9}]}
    done(page, "push", listed)
    assert "nothing was sent yet" in shown(page)[3] and "README.md" in shown(page)[3]
    for other in ((REPO, "Adapter", True), ("alice/other", "Adapter", False), (REPO, "Merged model", False)):
        assert "Dry run" in page.view.push("finished", *other)
    assert page.view.push("finished", REPO, "Adapter", False) == ""
    assert page.started[1:] == [["push", REPO, "--adapter", "--yes"]]


def test_gguf_files_of_the_run_can_be_pushed_and_no_others(page):
    (page.run.path / "gguf").mkdir()
    (page.run.path / "gguf" / "model.gguf").write_bytes(b"GGUF")
    assert page.view.depending("finished")[2].choices[-1][0] == "gguf/model.gguf"
    page.view.dry_run("finished", REPO, "gguf/model.gguf", True)
    assert page.started == [["push", REPO, f"--gguf={page.run.path}/gguf/model.gguf", "--public", "--dry-run"]]
    assert "what to push" in page.view.dry_run("finished", REPO, "../other.gguf", True)


def test_rows_of_before_can_be_chosen_where_there_are_some(page):
    assert HELD_OUT_BEFORE not in [choice[0] for choice in page.view.depending("finished")[0].choices]
    base_adapter.copy_base_adapter(page.run, page.run.adapter)
    assert HELD_OUT_BEFORE in [choice[0] for choice in page.view.depending("finished")[0].choices]
    page.view.evaluate("finished", "Chosen by the answers", "", 0, HELD_OUT_BEFORE, 0, False)
    assert page.started == [["eval", "--forgetting"]]


def test_an_export_to_gguf_says_what_llama_cpp_answered(page):
    assert "Not run yet" in shown(page)[4]
    page.view.export("finished", "Q8_0", True)
    assert page.started == [["export", "--type=q8_0", "--to=gguf-adapter"]]
    done(page, "export", {"file": "runs/x.gguf", "adapter": None, "modelfile": "runs/Modelfile",
                          "check": {"rows": 120, "same_answers": 119}})  # fmt: skip
    assert (
        "119 of 120 answers" in shown(page)[4] and "runs/Modelfile" in shown(page)[4] and "adapter</td>" not in shown(page)[4]
    )


def until(holds):
    while not holds():
        time.sleep(0.05)
