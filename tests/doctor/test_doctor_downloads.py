"""The hub, its login, and whether a recipe works offline: break each, and the check says so. No token leaks."""

import http.server
import json
import threading
from pathlib import Path

import pytest

from finetune.doctor.downloads import check_data, check_hub, check_login, check_model
from finetune.recipe import recipe_from

TOKEN = "hf_" + "s3cret" * 6


def recipe(**changes):
    return recipe_from({"model_name_or_path": "tiny", "dataset": {"path": "support"}, **changes})


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine: `hub.answers[path] = status`, `hub.asked` are (path, authorization)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            hub.asked.append((self.path, self.headers.get("Authorization")))
            self.send_response(hub.answers.get(self.path.split("?")[0], 404))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.answers, hub.asked = {"/api/models": 200, "/api/whoami-v2": 200}, []
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield hub
    hub.shutdown()
    hub.server_close()


def test_a_hub_in_trouble_is_a_warning_and_one_that_is_not_there_says_what_still_works(hub):
    for status in (429, 500, 503):
        hub.answers["/api/models"] = status
        finding = check_hub()
        assert finding.state == "warn" and str(status) in finding.what
    hub.shutdown()
    hub.server_close()
    finding = check_hub()
    assert finding.state == "warn" and "refused" in finding.what and "Cached and local models" in finding.fix


def test_without_a_login_or_switched_off_the_hub_is_not_asked(hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent")
    finding = check_login()
    assert finding.state == "skip" and "hf auth login" in finding.fix and hub.asked == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (check_hub().state, check_login().state) == ("skip", "skip")
    assert hub.asked == []


@pytest.mark.slow
@pytest.mark.parametrize(("status", "state"), [(200, "ok"), (401, "fail"), (403, "fail"), (500, "warn")])
def test_a_token_is_tried_and_never_shown(hub, monkeypatch, status, state):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.answers["/api/whoami-v2"] = status
    finding = check_login()
    assert finding.state == state
    assert hub.asked == [("/api/whoami-v2", f"Bearer {TOKEN}")]
    assert TOKEN not in json.dumps(finding.as_json())


def test_a_broken_token_is_not_shown_either(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: f"{TOKEN}\n{TOKEN}")
    finding = check_login()
    assert finding.state == "warn" and TOKEN not in json.dumps(finding.as_json())


def test_bundled_model_and_data_work_offline_missing_rows_are_a_failure_and_a_hub_dataset_is_looked_for(monkeypatch, tmp_path):
    assert check_model(recipe()).state == "ok"
    assert [finding.state for finding in check_data(recipe())] == ["ok", "ok"]
    (finding,) = check_data(recipe(dataset={"path": "nowhere.jsonl"}))
    assert finding.state == "fail" and "nowhere.jsonl" in finding.what
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    wanted = recipe(dataset={"path": "owner/MyRows"})
    assert [finding.state for finding in check_data(wanted)] == ["warn"]
    folder = tmp_path / "owner___my_rows" / "default" / "0.0.0" / "c0ffee"
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text("{}")
    assert [finding.state for finding in check_data(wanted)] == ["ok"]


def split(weights):
    """The first of two shards, and their index."""
    shards = {name: f"model-{number}-of-2.safetensors" for number, name in enumerate("ab", 1)}
    (weights.parent / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    weights.rename(weights.parent / shards["a"])


@pytest.mark.parametrize(
    ("file", "damage", "what"),
    [
        *((f"{name}.json", Path.unlink, f"{name}{end} is missing") for name, end in (("config", ".json"), ("tokenizer", ""))),
        ("model.safetensors", Path.unlink, "model.safetensors is missing"),
        ("model.safetensors", lambda weights: weights.write_bytes(weights.read_bytes()[:-1]), "is truncated"),
        ("model.safetensors", lambda weights: weights.write_bytes(b""), "truncated"),
        ("model.safetensors", split, "model-2-of-2.safetensors is missing"),
        ("model.safetensors", lambda weights: weights.rename(weights.with_name("model-1-of-2.safetensors")), "is missing"),
    ],
)
def test_a_missing_or_damaged_file_of_a_cached_model_is_named(cached_model, file, damage, what):
    damage(cached_model / file)
    finding = check_model(recipe(model_name_or_path="owner/name"))
    assert finding.state == "warn" and what in finding.what and "hf download owner/name" in finding.fix


def test_another_revision_is_not_the_cached_one_and_an_incomplete_local_model_is_a_failure(cached_model):
    finding = check_model(recipe(model_name_or_path="owner/name", model_revision="b" * 40))
    assert finding.state == "warn" and f"--revision {'b' * 40}" in finding.fix
    (cached_model / "model.safetensors").unlink()
    assert check_model(recipe(model_name_or_path=str(cached_model))).state == "fail"
