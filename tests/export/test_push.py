"""A push is one complete commit or none, reports what stopped it in one sentence, and reveals nothing of this machine."""

import functools
import json
import re

import pytest
from hub_stand_in import hub_stand_in

from finetune.errors import CommandError, FinetuneError, HubError
from finetune.events import EventWriter, ForecastCheck
from finetune.export.push import files_to_send, model_card, push, without_local_paths
from finetune.files import write_manifest
from finetune.run.directory import RunDirectory

REPO = "alice/support-lora"
NAMES = {"README.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "tokenizer.json",
         "tokenizer_config.json"}  # fmt: skip


@pytest.fixture
def run(home, kept_run):
    directory = RunDirectory(kept_run(home))
    gap = {"value": 0.5, "low": 0.25, "high": 0.75, "more_rows": None}
    figures = {"exact_match": 0.5, "score": 0.5, "loss": 1.0, "perplexity": 2.7, "token_accuracy": 0.5}
    scores = {"rows": 6, "base": figures, "tuned": figures, "score": "exact", "exact_match_difference": gap,
              "score_difference": gap, "loss_difference": None, "prompts": [], "references": [], "seconds": 1.0,
              "data": "/home/someone/secret project/mine.jsonl"}  # fmt: skip
    (directory.path / "evaluations").mkdir()
    (directory.path / "evaluations" / "scores-exact.json").write_text(json.dumps(scores))
    return directory


@pytest.fixture
def hub(monkeypatch):
    """The stand-in, with a token that may write, and no waiting between attempts."""
    for name, value in (("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True), ("HF_TOKEN_PATH", "/nowhere/token")):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setenv("HF_TOKEN", "hf_writes")
    with hub_stand_in() as stand_in:
        monkeypatch.setenv("HF_ENDPOINT", stand_in.url)
        yield stand_in


def test_a_push_is_one_commit_of_all_files_in_a_private_repository_without_local_paths(run, hub):
    files = files_to_send(run, "adapter")
    assert push(REPO, files) == f"{hub.url}/{REPO}/commit/1"
    [commit] = hub.repos[REPO]["commits"]
    assert set(commit) == NAMES and hub.repos[REPO]["private"]
    weights = (run.adapter / "adapter_model.safetensors").read_bytes()
    assert commit["adapter_model.safetensors"] == weights and commit["README.md"].decode() == model_card(run, "adapter")
    values = {"base_model_name_or_path": "/a/b/base", "x": {"name_or_path": "Qwen/Qwen3-8B", "text": "/no_think"}}
    assert without_local_paths(values) == values | {"base_model_name_or_path": "base"}


def test_the_card_has_figures_with_intervals_names_a_torn_evaluation_and_no_row_or_path(run):
    EventWriter(run.events).emit(ForecastCheck(predicted_allocated_bytes=2 * 2**30, measured_allocated_bytes=3 * 2**30))
    card = model_card(run, "adapter")
    assert "+50 points (95 % interval +25 to +75)" in card and "| 6 rows of mine.jsonl |" in card
    assert "Allocated memory at the peak: 3.00 GiB, forecast 2.00 GiB." in card
    rows = json.loads((run.data / "eval_examples.json").read_text())
    assert not any(row["prompt"][:40] in card or row["answer"] in card for row in rows)
    assert "/home" not in card and "someone" not in card
    assert json.loads(dict(files_in_push(run))["adapter_config.json"])["base_model_name_or_path"] == "tiny-base"
    (run.path / "evaluations" / "scores-torn.json").write_text('{"rows": 4, ')
    card = model_card(run, "adapter")
    assert "scores-torn.json can't be read" in card and "+50 points" in card


def files_in_push(run):
    return [(file.name, file.source) for file in files_to_send(run, "adapter")]


@pytest.mark.parametrize(
    ("text", "message"), [("hf_" + "a" * 30, "looks like a token"), ("/home/someone/models", "path '/home/someone'")]
)
def test_a_token_or_a_path_in_a_file_stops_the_push_and_a_token_is_not_repeated(run, text, message):
    (run.adapter / "chat_template.jinja").write_text("{# " + text + " #}")
    write_manifest(run.adapter, {})
    with pytest.raises(FinetuneError) as error:
        files_in_push(run)
    assert message in str(error.value) and "hf_a" not in str(error.value)


def refused(repo, files, kind, **options):
    with pytest.raises(kind) as error:
        push(repo, files, **options)
    assert "\n" not in error.value.problems[0]
    return error.value.problems[0]


def test_what_the_hub_refuses_is_reported_in_one_sentence(run, hub, monkeypatch):
    files = files_to_send(run, "adapter")
    assert "OWNER/NAME" in refused("alone", files, CommandError)
    refusals = {"hf_reads": "may not write to alice/support-lora (403)", "hf_other": "does not know this token"}
    for token, message in refusals.items():
        monkeypatch.setenv("HF_TOKEN", token)
        assert message in refused(REPO, files, CommandError)
    monkeypatch.delenv("HF_TOKEN")
    assert "no token" in refused(REPO, files, CommandError)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "switched off" in refused(REPO, files, CommandError)
    assert hub.repos == {}


def test_a_repository_with_files_is_left_alone_unless_it_is_to_be_updated(run, hub):
    files = files_to_send(run, "adapter")
    hub.repos[REPO] = {"private": True, "commits": []}
    push(REPO, files)  # it was empty
    assert "already exists and has 6 files" in refused(REPO, files, CommandError)
    push(REPO, files, update=True)
    assert len(hub.repos[REPO]["commits"]) == 2
    hub.repos[REPO]["private"] = False
    assert "is public" in refused(REPO, files, CommandError, update=True)


@pytest.mark.slow
def test_without_a_network_at_any_moment_nothing_is_half_written_and_the_next_push_is_complete(run, hub):
    files, repo = files_to_send(run, "adapter"), "alice/first"
    push(repo, files)
    for moment in range(1, len(hub.requests) + 1):
        hub.objects.clear()
        hub.requests.clear()
        hub.before, name = (lambda number, moment=moment: number >= moment), f"alice/lost-{moment}"
        assert "the hub" in refused(name, files, HubError)
        hub.before = lambda number: False
        assert not hub.repos.get(name, {}).get("commits")
        push(name, files)
        assert hub.files(name) == hub.files(repo)


def test_the_command_lists_asks_and_sends_nothing_in_a_dry_run(run, hub, finetune):
    push_finished = functools.partial(finetune, "push", "finished")
    (run.path.parent / "runs").mkdir()
    run.path.rename(run.path.parent / "runs" / "finished")
    code, output = push_finished(REPO, "--dry-run")
    assert code == 0 and "adapter_model.safetensors 16 KiB" in output and "(private)" in output and "dry run" in output
    assert hub.requests == [] and push_finished(REPO)[0] == 2 and "add --yes" in push_finished(REPO)[1] and hub.requests == []
    code, output = push_finished(REPO, "--yes", "--json")
    values = json.loads(output)
    assert code == 0 and values["sent"] and {file["name"] for file in values["files"]} == NAMES
    assert push_finished(REPO, "--yes")[0] == 2 and push_finished("no repo", "--dry-run")[0] == 2
    code, output = push_finished(REPO, "--merged", "--dry-run")
    assert code == 2 and "finetune merge" in output
    (run.path.parent / "model.gguf").write_bytes(b"GGUF")
    code, output = push_finished("alice/gguf", "--gguf", "model.gguf", "--yes")
    assert code == 0 and set(hub.files("alice/gguf")) == {"README.md", "model.gguf"}
    hub.before = lambda number: True
    code, output = push_finished("alice/down", "--yes")
    assert code == 1 and re.search("can't be used now", output)
