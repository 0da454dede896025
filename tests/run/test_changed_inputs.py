"""What a run trained on and what it made can't be swapped without a word: data, base model, adapter."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.bundled import model_path
from finetune.distributed.ranks import Rank
from finetune.errors import RecipeError
from finetune.evaluate.answerer import Answerer
from finetune.export.merge import merge
from finetune.model.weights import weights_fingerprint
from finetune.planner.plan import read_plan
from finetune.recipe import resolved
from finetune.run import control
from finetune.run.directory import RunDirectory, require_data
from finetune.run.seal import MANIFEST, changes_in, facts_differ, write_manifest
from finetune.run.state import read_state
from finetune.run.worker import Worker

pytestmark = pytest.mark.slow


def flip_one_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def finished(make_run, train):
    run = make_run("max_steps=2")
    assert train(run) == 0, run.log.read_text()[-2000:]
    return run


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished.path, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def test_a_changed_token_of_the_prepared_rows_is_refused(run):
    flip_one_byte(next((run.data / "train").glob("*.arrow")))
    with pytest.raises(RecipeError, match=r"train/.*\.arrow has changed"):
        require_data(run)


@pytest.mark.parametrize("use", [Answerer, lambda run: merge(run, run.path / "out")])
def test_a_changed_adapter_is_neither_evaluated_nor_merged(run, use):
    flip_one_byte(run.adapter / "adapter_model.safetensors")
    with pytest.raises(RecipeError, match=r"adapter_model\.safetensors has changed"):
        use(run)


def test_an_adapter_that_is_not_finite_is_named(run):
    path = run.adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, path)
    write_manifest(run.adapter, {})
    with pytest.raises(RecipeError, match="not finite"):
        Answerer(run)


def test_files_that_a_library_would_load_must_be_in_the_manifest(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"a")
    write_manifest(tmp_path, {})
    (tmp_path / "README.md").write_text("mine")
    assert changes_in(tmp_path) == []
    (tmp_path / "model.safetensors").write_bytes(b"b")
    assert changes_in(tmp_path) == ["model.safetensors is not in its manifest"]


def test_a_run_of_an_older_version_without_manifests_is_still_used(run):
    for folder in (run.data, run.adapter):
        (folder / MANIFEST).unlink()
    require_data(run)
    assert changes_in(run.adapter) == []


def test_another_base_model_under_the_same_name_is_another_fact(run, tmp_path):
    base = tmp_path / "base"
    settings = resolved(read_plan(run.plan).settings, model_name_or_path=str(base))
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (base / "model.safetensors").write_bytes(bytes(1000))
    before = weights_fingerprint(settings)
    assert weights_fingerprint(settings) == before
    flip_one_byte(base / "model.safetensors")
    assert facts_differ({"base": before}, {"base": weights_fingerprint(settings)}) == ["the base model's weights have changed"]


@pytest.mark.parametrize("local", [0, 1])
def test_one_process_of_a_machine_hashes_the_base_models_files(run, local, monkeypatch):
    worker = Worker.__new__(Worker)
    worker.run, worker.plan, worker.rank = run, read_plan(run.plan), Rank(2 + local, local, 4)
    hashed = []
    monkeypatch.setattr("finetune.run.worker.weights_fingerprint", lambda settings: hashed.append(settings) or "a hash")
    assert worker._facts.get("base") == ("a hash" if local == 0 else None) and len(hashed) == (local == 0)
    assert worker._facts is worker._facts


def test_resuming_on_a_changed_base_model_is_refused(make_run, train, tmp_path):
    shutil.copytree(model_path("tiny"), tmp_path / "base")
    run = make_run(f"model_name_or_path={tmp_path / 'base'}")
    assert train(run) == 0
    shutil.rmtree(run.adapter)
    flip_one_byte(tmp_path / "base" / "model.safetensors")
    assert train(run) == 1
    assert "the base model's weights have changed" in read_state(run).message


def test_a_module_in_the_working_folder_is_not_imported_by_a_run(run, tmp_path, monkeypatch):
    for name in ("psutil", "datasets", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working folder')")
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(run.adapter)
    run.events.unlink()
    assert control.start(run)
    assert control.wait(run, 300)
    assert read_state(run).state == "finished", run.log.read_text()[-2000:]
