"""What a run trained on and what it made can't be swapped without a word: data, base model, adapter."""

import shutil

import pytest
import torch
from conftest import copy_of, flip_one_byte
from safetensors.torch import load_file, save_file

from finetune.bundled import model_path
from finetune.distributed import Rank
from finetune.errors import RecipeError
from finetune.evaluate.answerer import Answerer
from finetune.evaluate.score import compare
from finetune.export.merge import merge
from finetune.files import MANIFEST, changes_in, read_json, write_json, write_manifest
from finetune.model.weights import weights_fingerprint
from finetune.planner.plan import read_plan
from finetune.recipe import load_recipe
from finetune.run import control
from finetune.run.directory import require_data
from finetune.run.seal import require_own_adapter
from finetune.run.state import read_state
from finetune.run.worker import Worker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(make_run, train):
    return train.whole(make_run("max_steps=2"))


@pytest.fixture
def run(finished, tmp_path):
    return copy_of(finished, tmp_path / "run")


def test_a_changed_token_of_the_prepared_rows_and_a_lost_manifest_are_named(run):
    flip_one_byte(next((run.data / "train").glob("*.arrow")))
    with pytest.raises(RecipeError, match=r"train/.*\.arrow has changed"):
        require_data(run)
    for folder in (run.data, run.adapter):
        (folder / MANIFEST).unlink()
    with pytest.raises(RecipeError, match=r"MANIFEST\.json is missing"):
        require_data(run)
    with pytest.raises(RecipeError, match=r"MANIFEST\.json is missing"):
        require_own_adapter(run, run.adapter)


@pytest.mark.parametrize("use", [Answerer, lambda run: merge(run, run.path / "out")])
def test_a_changed_adapter_is_neither_evaluated_nor_merged(run, use):
    flip_one_byte(run.adapter / "adapter_model.safetensors")
    with pytest.raises(RecipeError, match=r"adapter_model\.safetensors has changed"):
        use(run)


def test_an_adapter_that_is_not_finite_or_of_another_run_is_refused(run, make_run, train):
    path = run.adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, path)
    write_manifest(run.adapter, {})
    with pytest.raises(RecipeError, match="not finite"):
        Answerer(run)
    other = train.whole(make_run("max_steps=2", "seed=7"))
    shutil.rmtree(run.adapter)
    shutil.copytree(other.adapter, run.adapter)
    with pytest.raises(RecipeError, match="belongs to another run: seed was 7"):
        Answerer(run)


def test_files_that_a_library_would_load_must_be_in_the_manifest(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"a")
    write_manifest(tmp_path, {})
    (tmp_path / "README.md").write_text("mine")
    assert changes_in(tmp_path) == []
    (tmp_path / "model.safetensors").write_bytes(b"b")
    assert changes_in(tmp_path) == ["model.safetensors is not in its manifest"]


@pytest.fixture(scope="module")
def on_a_copy(make_run, train, tmp_path_factory):
    """A finished run on a copy of the base model, and the copy."""
    base = shutil.copytree(model_path("tiny"), tmp_path_factory.mktemp("model") / "base")
    run = train.whole(make_run(f"model_name_or_path={base}", "max_steps=2"))
    return run, base


def with_value(name, **values):
    """A fault: other values in a JSON file of the base model."""
    return lambda base: write_json(base / name, {**read_json(base / name), **values})


def flip_one_byte_of_the_weights(base):
    flip_one_byte(base / "model.safetensors")


@pytest.fixture
def changed_base(on_a_copy, tmp_path):
    """change(fault) -> a copy of that run whose base model's files were changed by `fault`."""
    run, base = on_a_copy
    saved = shutil.copytree(base, tmp_path / "saved")

    def change(fault):
        weights_fingerprint(read_plan(run.plan).settings)  # is kept by the files' times
        fault(base)
        return copy_of(run, tmp_path / "run")

    yield change
    shutil.copytree(saved, base, dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("fault", "use"),
    [(with_value("config.json", rms_norm_eps=1e-2), compare), (flip_one_byte_of_the_weights, Answerer),
     (with_value("generation_config.json", repetition_penalty=1.5), lambda run: merge(run, run.path / "out"))],
)  # fmt: skip
def test_an_adapter_is_not_used_with_another_base_model(changed_base, fault, use):
    with pytest.raises(RecipeError, match=r"can't be used with .*base: the base model's \w+.* changed"):
        use(changed_base(fault))


def test_a_run_does_not_resume_on_a_changed_base_model(changed_base, train):
    run = changed_base(flip_one_byte_of_the_weights)
    shutil.rmtree(run.adapter)
    assert train(run) == 1
    assert "can't resume from checkpoint-2: the base model's" in read_state(run).message


def test_garbage_in_the_cache_of_hashes_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    settings = load_recipe("tiny-cpu", [])
    before = weights_fingerprint(settings)
    for path in (tmp_path / "weights").iterdir():
        path.write_bytes(b"\xff\xfe")
    assert weights_fingerprint(settings) == before


@pytest.mark.parametrize("local", [0, 1])
def test_one_process_of_a_machine_hashes_the_base_models_files(run, local, monkeypatch):
    worker = Worker.__new__(Worker)
    worker.run, worker.plan, worker.rank = run, read_plan(run.plan), Rank(2 + local, local, 4)
    hashed = []
    monkeypatch.setattr("finetune.run.seal.weights_fingerprint", lambda settings, **_: hashed.append(1) or "a hash")
    assert worker._facts.result().get("base") == ("a hash" if local == 0 else None) and len(hashed) == (local == 0)
    assert worker._facts is worker._facts


def test_a_module_in_the_working_folder_is_not_imported_by_a_run(run, tmp_path, monkeypatch):
    for name in ("psutil", "datasets", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working folder')")
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(run.adapter)
    run.events.unlink()
    assert control.start(run)
    assert control.wait(run, 300)
    assert read_state(run).state == "finished", run.log.read_text()[-2000:]
