"""Training a model of the hub's cache asks the hub nothing."""

import os
import shutil
import warnings

import pytest

from finetune.bundled import model_path

pytestmark = pytest.mark.slow


@pytest.fixture
def cached(monkeypatch, tmp_path):
    """The bundled model in a hub cache; returns its name there."""
    folder = tmp_path / "hub" / "models--owner--name"
    shutil.copytree(model_path("tiny"), folder / "snapshots" / ("a" * 40))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return "owner/name"


@pytest.mark.parametrize("offline", ["0", "1"])
def test_no_save_asks_for_the_base_models_vocabulary(make_run, train, cached, tmp_path, offline):
    asked = tmp_path / "asked"

    def on_a_machine_with_a_network():
        import peft.utils.other

        os.environ["HF_HUB_OFFLINE"] = offline  # which PEFT reads, the others have read it
        peft.utils.other.file_exists = lambda *_, **__: asked.touch()
        warnings.filterwarnings("error", message="Could not find a config file")

    run = make_run(f"model_name_or_path={cached}", "max_steps=2")
    assert train(run, on_a_machine_with_a_network) == 0, run.log.read_text()[-2000:]
    assert (run.path / "adapter").is_dir() and not asked.exists()
