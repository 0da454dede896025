"""What people do by habit works: runs kept elsewhere, settings changed on resume, leaving the chat."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from finetune.cli import render, runs
from finetune.cli.chat import _typed_questions, read_tools_file
from finetune.cli.run import _data_lines
from finetune.cli.source import recipe_of
from finetune.data.report import DataReport, Finding
from finetune.errors import CommandError, RecipeError
from finetune.evaluate import score
from finetune.evaluate.results import Comparison, Score
from finetune.events import EventWriter, State
from finetune.files import parse_checked, write_json
from finetune.recipe import load_recipe
from finetune.run.control import rename_run, update_settings
from finetune.run.directory import RunDirectory, open_run, register, runs_from_here
from finetune.run.prepare import create_run, prepare
from finetune.run.state import process_record


def make_run_directory(path: Path) -> RunDirectory:
    path.mkdir(parents=True)
    (path / "plan.json").write_text("{}")
    return RunDirectory(path)


def test_one_run_is_shown_with_its_losses_and_recipe(tmp_path, kept_run, finetune):
    run = RunDirectory(kept_run(tmp_path))
    (run.path / "evaluations").mkdir()
    score = {"exact_match": 0.25, "loss": 1.5}
    values = {"rows": 8, "base": score, "tuned": score, "prompts": [], "references": [], "seconds": 1.0}
    (run.path / "evaluations" / "scores-exact.json").write_text(json.dumps(values))
    code, captured = finetune("runs", "show", str(run.path))
    assert code == 0 and "step 6 of 6" in captured.out and ", held out " in " ".join(captured.out.split())
    assert "exact match" in captured.out and "25.0%" in captured.out and "lora_r: 1" in captured.out
    code, captured = finetune("runs", "show", str(run.path), "--json")
    assert json.loads(captured.out)["scores"]["exact"]["tuned"]["loss"] == 1.5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["runs", "rm", "n" * 5000], "is not a run directory"),
        (["runs", "rename", "a", "m" * 300], "is not a valid run name"),
        (["cache", "purge"], "finetune cache purge: unknown"),
        (["runs", "burn"], "finetune runs burn: unknown"),
        (["runs", "rm"], "finetune runs rm: a RUN is missing"),
        (["runs", "rename", "a"], "finetune runs rename: takes RUN and NAME"),
        (["runs", "--memory"], "finetune runs list: takes no --memory"),
        (["chat", "a", "--prompt", " "], "--prompt is empty"),
        (["plan", "tiny-cpu", "--free", ""], "--free: "),
    ],
)
def test_a_wrong_name_is_reported_in_one_sentence(tmp_path, monkeypatch, arguments, says, finetune):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    make_run_directory(tmp_path / "runs" / "a")
    code, captured = finetune(*arguments)
    assert code == 2 and captured.err.startswith("This can't be done\n") and says in " ".join(captured.err.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "runs"]


def test_runs_are_renamed_deleted_once_and_found_from_where_they_were_started(tmp_path, monkeypatch, finetune):
    monkeypatch.chdir(tmp_path)
    renamed = rename_run(make_run_directory(tmp_path / "runs" / "a"), "b")
    assert open_run("b").path == Path("runs/b")
    with pytest.raises(RecipeError, match="not a valid"):
        rename_run(renamed, "../b")
    deleted = json.loads(finetune("runs", "rm", "b", "runs/b", "--json")[1].out)  # one object: deleted once
    assert (Path(deleted["trash"]) / "plan.json").is_file() and runs_from_here() == []
    run = make_run_directory(tmp_path / "elsewhere" / "mine")
    register(run)
    assert [run_directory.path for run_directory in runs_from_here()] == [Path("elsewhere/mine")]
    assert open_run("latest").path == open_run("mine").path == Path("elsewhere/mine")
    assert recipe_of("tiny-cpu", ["adapter=mine"]).adapter_name_or_path == "elsewhere/mine"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert runs_from_here() == []


def test_settings_without_a_part_in_what_is_learnt_change_on_resume():
    planned = create_run(prepare(load_recipe("tiny-cpu", ["output_dir=elsewhere/mine"])))
    assert open_run("latest").path == Path("elsewhere/mine")
    assert update_settings(planned, ["save_steps=7", "eval_steps=9"]) == {"save_steps": 7, "eval_steps": 9}
    assert parse_checked(planned.adjustments.read_bytes())["changes"] == {"save_steps": 7, "eval_steps": 9}
    refused = ["lora_r=4", "max_steps=9", "learning_rate=1e-3", "output_dir=x", "save_total_limit=auto"]
    with pytest.raises(RecipeError) as error:
        update_settings(planned, refused)
    assert len(error.value.problems) == 5 and "change the training steps" in error.value.problems[0]
    with pytest.raises(RecipeError, match="save_steps"):
        update_settings(planned, ["save_steps=often"])
    with pytest.raises(RecipeError, match="did you mean 'save_steps'"):
        update_settings(planned, ["save_step=1"])


def test_exit_leaves_the_chat(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hi\n\n/exit\nnever asked\n")))
    assert list(_typed_questions()) == ["Hi"]


def test_the_list_of_runs_fits_sixty_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = make_run_directory(tmp_path / "runs" / ("a-long-name-of-a-run-" * 3))
    write_json(run.process, {})
    narrow = Console(width=60, highlight=False, file=io.StringIO())
    monkeypatch.setattr(render, "out", narrow)
    monkeypatch.setattr(runs, "out", narrow)
    runs.change_runs("list", [], as_json=False)
    lines = narrow.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 60 and "state" in lines[0] and "loss" in lines[0]


def test_convert_writes_a_recipe_or_reports_a_problem_of_the_disk(finetune):
    source = Path(__file__).parents[1] / "recipe" / "foreign" / "llama-factory.yaml"
    code, captured = finetune("convert", str(source), "-o", "recipe.yaml")
    assert code == 0 and "written" in captured.out and "LLaMA-Factory's default" in captured.err
    assert "lora_r: 8" in Path("recipe.yaml").read_text()
    code, captured = finetune("convert", str(source), "-o", "/sys/recipe.yaml")
    assert code == 7 and "/sys/" in captured.err and "Internal error" not in captured.err


def test_finish_of_a_run_that_waits_or_can_not_be_written_says_so(tmp_path, monkeypatch, kept_run, finetune):
    run = RunDirectory(kept_run(tmp_path))
    write_json(run.process, {"supervisor": process_record(os.getpid())})
    monkeypatch.setattr(Path, "touch", lambda path, **_: (_ for _ in ()).throw(OSError(28, "No space left")))
    for state, code, reason in (("running", 7, "can't be written: No space left"), ("queued", 2, "has not begun: 1 ahead")):
        writer = EventWriter(run.events)
        writer.emit(State(state=state, message="1 ahead"))
        writer.close()
        refused, captured = finetune("finish", str(run.path))
        assert refused == code and reason in " ".join(captured.err.split())


def test_a_note_on_held_out_rows_says_so():
    report = DataReport((), "text", 9, 9, findings=(Finding("near duplicates", "{rows} say the same", 2, (), ""),))
    assert "held-out" not in "".join(_data_lines("Training", report))
    assert "held-out data: 2 row(s)" in "".join(_data_lines("Held-out", report))


def test_scores_on_trained_rows_say_so_and_a_missing_file_brings_up_its_neighbour(tmp_path, monkeypatch, kept_run, finetune):
    run = str(kept_run(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "orders.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    code, captured = finetune("eval", run, "--data", "order.jsonl")
    assert code == 4 and "order.jsonl: there is no such file" in captured.err and "Did you mean orders.jsonl?" in captured.err
    scores = Score(1.0, 0.5, answers=['{"n": 1}'], exact=[True], scores=[1.0], row_losses=[0.5], row_tokens=[4], thoughts=[""])
    why = {"score": "json", "data": "orders.jsonl", "trained_rows": 1, "score_because": "JSON objects"}
    result = Comparison(1, scores, scores, ["p"], ['{"n": 1}'], 1.0, **why)
    monkeypatch.setattr(score, "compare", lambda *_, **__: result)
    code, captured = finetune("eval", run, "--data", "orders.jsonl")
    printed = " ".join(captured.out.split())
    assert code == 0 and "the run was trained on 1 of these 1 sequences: memorised rows score well here" in printed
    assert "score: json, chosen for JSON objects; choose another with --score NAME" in printed


def test_tools_are_read_as_in_rows_and_a_file_that_has_none_is_refused_with_a_reason(tmp_path):
    path = tmp_path / "tools.json"
    with pytest.raises(CommandError, match="can't be read"):
        read_tools_file(str(path))
    for content, reason in (("{", "not JSON"), ("3", "not a list"), ('"x"', "is text"), ("[3]", "not a list")):
        path.write_text(content)
        with pytest.raises(CommandError, match=reason):
            read_tools_file(str(path))
    path.write_text('[{"name": "f", "parameters": {"city": {"type": "str"}}}]')
    [tool] = read_tools_file(str(path))
    assert tool["function"]["parameters"]["required"] == ["city"] and read_tools_file(None) == ()
