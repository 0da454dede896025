"""A reference that is computed before the training: as the one of each step, sealed, and computed again where it is damaged."""

import numpy as np
import pytest
from child_faults import killed_before_seal
from conftest import adapter_hash, copy_of, events_of, manifest

from finetune.events import RunWarning, Step
from finetune.manifest import MANIFEST, write_manifest
from finetune.run.state import read_state

pytestmark = pytest.mark.slow
PAIRS = ["method=dpo", "dataset.path=support-pairs"]


@pytest.fixture(scope="module")
def whole(make_run, train):
    return train.whole(make_run(*PAIRS, "precompute_ref_log_probs=true"))


def test_losses_are_those_of_a_reference_that_is_computed_in_each_step(whole, make_run, train):
    usual = train.whole(make_run(*PAIRS))
    losses = [[step.loss for step in events_of(run, Step)] for run in (whole, usual)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][0] == pytest.approx(np.log(2), abs=1e-4)


@pytest.fixture(scope="module")
def killed_once(make_run, train):
    run = make_run(*PAIRS, "precompute_ref_log_probs=true")
    assert train(run, killed_before_seal(6)) == 137
    return run


@pytest.fixture
def killed(killed_once, tmp_path):
    """A run that was killed in step 6, with a checkpoint of step 4."""
    return copy_of(killed_once, tmp_path / "run")


@pytest.mark.parametrize("damage", ["none", "bytes", "missing"])
def test_resumed_with_a_damaged_reference_the_adapter_is_the_same(whole, killed, train, damage):
    values = killed.path / "reference" / "train.npy"
    if damage == "bytes":
        values.write_bytes(values.read_bytes()[:-4] + b"\0\0\0\0")
    elif damage == "missing":
        values.unlink()
    train.whole(killed)
    assert adapter_hash(killed) == adapter_hash(whole)
    warnings = [event.message for event in events_of(killed, RunWarning)]
    assert any("reference is computed again" in message for message in warnings) == (damage != "none")


def test_a_checkpoint_is_not_continued_with_another_reference(killed, train):
    folder = killed.path / "reference"
    np.save(folder / "train.npy", np.load(folder / "train.npy") + 1)
    facts = manifest(folder)["facts"]
    (folder / MANIFEST).unlink()
    write_manifest(folder, {"facts": facts})
    assert train(killed) != 0
    assert "the precomputed reference has changed" in read_state(killed).message
