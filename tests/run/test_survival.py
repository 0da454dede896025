"""What was trained is not lost: killed, stopped, out of disk or broken, a resumed run equals the one that never failed."""

import os
import random
import shutil
import time
from pathlib import Path

import pytest
from child_faults import in_step, killed_before_seal
from conftest import adapter_hash, copy_of, events_of, flip_one_byte, fresh_copy, kill, started_to

from finetune.events import EventReader, EventWriter, RunWarning, Start, Step, read_events
from finetune.files import write_manifest
from finetune.run.seal import newest_verified
from finetune.run.state import read_state

pytestmark = pytest.mark.slow
PADDED_EPOCHS = [
    "effective_batch_size=4", "per_device_train_batch_size=2", "dataset.max_rows=32", "max_steps=null", "num_train_epochs=2",
]  # fmt: skip
PACKED_BY_WORKERS = ["packing=true", "max_length=256", "dataloader_num_workers=2"]
PAIRS = ["method=dpo", "dataset.path=support-pairs"]
LABELS = ["method=kto", "dataset.path=support-pairs", "effective_batch_size=4", "per_device_train_batch_size=2"]
TILED = [
    "lora_dropout=0", "lean_layers=true", "target_modules=all-linear", "activation_checkpointing=true", "mlp_tile_tokens=32",
]  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(make_run, train):
    """A run of dropout, shuffling and accumulation that nothing happened to."""
    return train.whole(make_run("lora_dropout=0.1"))


@pytest.fixture
def twin(unbroken, tmp_path):
    """A copy of the unbroken run as it was before its start."""
    return fresh_copy(unbroken, tmp_path / "twin")


@pytest.fixture
def ended(unbroken, tmp_path):
    """A copy of the unbroken run without its adapter."""
    return copy_of(unbroken, tmp_path / "run", "adapter")


def losses(run):
    """Loss by step; a step that was repeated after a crash must show the same loss again."""
    by_step = {}
    for event in events_of(run, Step):
        assert by_step.setdefault(event.step, event.loss) == event.loss
    return by_step


@pytest.mark.parametrize(
    ("overrides", "n_kills"),
    [((), 3), *(pytest.param(overrides, 20, marks=pytest.mark.exhaustive) for overrides in ((), PAIRS, LABELS))],
)
def test_killed_at_random_moments_the_adapter_is_the_same(unbroken, make_run, tmp_path, train, overrides, n_kills):
    whole = train.whole(make_run(*overrides)) if overrides else unbroken
    times = [event.time_s for event in read_events(whole.events)]
    lasts_s, moments = times[-1] - times[0] + 0.5, random.Random(0)
    for number in range(n_kills):  # each is killed in another part of its time
        run = fresh_copy(whole, tmp_path / str(number))
        pid = train.start(run)
        time.sleep(0.2 + (lasts_s - 0.2) * (number + moments.random()) / n_kills)
        kill(pid)
        assert adapter_hash(train.whole(run)) == adapter_hash(whole), number


def test_killed_after_the_last_checkpoint_inside_an_epoch_nothing_more_is_trained(make_run, train, tmp_path):
    run = train.whole(make_run("max_steps=6", "lr_scheduler_type=constant"))
    killed = train.whole(copy_of(run, tmp_path / "killed", "adapter"))
    assert max(losses(killed)) == 6 and adapter_hash(killed) == adapter_hash(run)


def test_killed_while_saving_resumes_from_the_seal_before_and_finishes_once_the_result_is_on_disk(
    unbroken, twin, train, tmp_path
):
    def record_order():
        sync, emit = os.fsync, EventWriter.emit

        def record(message):
            with (tmp_path / "order").open("a") as file:
                file.write(f"{message}\n")

        def fsync(number):
            record(str(Path(f"/proc/self/fd/{number}").readlink()))
            sync(number)

        def emitted(self, event):
            record(f"event {getattr(event, 'state', '')}")
            emit(self, event)

        os.fsync, EventWriter.emit = fsync, emitted

    assert train(twin, killed_before_seal(6)) == 137
    assert newest_verified(twin.checkpoints)[0].step == 4
    assert train(twin, record_order) == 0
    assert adapter_hash(twin) == adapter_hash(unbroken)
    assert losses(twin) == losses(unbroken)
    order = (tmp_path / "order").read_text().splitlines()
    before = order[: order.index("event finished")]
    assert str(twin.path / ".adapter" / "adapter_model.safetensors") in before
    assert str(twin.path) in before


def test_a_run_whose_directory_is_deleted_ends_after_its_step(twin, train, tmp_path):
    pid = started_to(train, twin, 3, tmp_path / "deleted")
    shutil.rmtree(twin.path)
    (tmp_path / "deleted").touch()
    assert train.wait(pid) == 1
    assert not twin.path.exists() and read_state(twin).ended


def test_nan_in_float16_names_float16_first(make_run, train):
    run = make_run("dtype=float16", "save_steps=0")
    assert train(run, in_step(1, lambda _, loss: loss * float("nan"))) == 6
    assert "There is no checkpoint yet. Try dtype=float32, or learning_rate=" in read_state(run).message


@pytest.mark.parametrize(("where", "value"), [("loss", "nan"), ("gradient", "inf")])
def test_what_is_not_finite_ends_as_diverged_and_is_never_sealed(twin, train, where, value):
    def spoil(trainer, loss):
        if where == "gradient":
            next(p for p in trainer.model.parameters() if p.grad is not None).grad.fill_(float(value))
        return loss * float(value) if where == "loss" else loss

    assert train(twin, in_step(6, spoil)) == 6
    state = read_state(twin)
    assert state.state == "diverged" and "checkpoint-4" in state.message and "learning_rate=" in state.message
    assert "dtype" not in state.message
    assert newest_verified(twin.checkpoints)[0].step == 4
    assert not twin.adapter.exists()


@pytest.mark.parametrize("fault_in", ["adapter_model.safetensors", pytest.param("rng_state.pth", marks=pytest.mark.exhaustive)])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(unbroken, ended, train, fault_in):
    flip_one_byte(ended.checkpoints / "checkpoint-8" / fault_in)
    offset = ended.events.stat().st_size
    assert train(ended) == 0
    events = EventReader(ended.events, offset).new()
    messages = [event.message for event in events if isinstance(event, RunWarning)]
    assert any("checkpoint-8 skipped" in message and fault_in in message for message in messages)
    assert next(event for event in events if isinstance(event, Start)).resumed_from == "checkpoint-6"
    assert adapter_hash(ended) == adapter_hash(unbroken)


def test_a_checkpoint_of_other_rows_or_settings_is_refused_with_what_differs(ended, train):
    (ended.data / "fingerprint").write_text("other rows")
    write_manifest(ended.data, {})
    (ended.path / "adjustments.json").write_text('{"changes": {"lora_r": 8}}')
    assert train(ended) == 1
    message = read_state(ended).message
    assert "the training data has changed" in message and "lora_r was" in message


@pytest.mark.parametrize(
    "overrides",
    [PADDED_EPOCHS, PACKED_BY_WORKERS, PAIRS, *(pytest.param(its, marks=pytest.mark.exhaustive) for its in (TILED, LABELS))],
)
def test_resume_is_exact_with_padding_packing_workers_epochs_tiles_and_answers(make_run, train, tmp_path, overrides):
    whole = train.whole(make_run("lora_dropout=0.1", *overrides))
    killed = train.whole(copy_of(whole, tmp_path / "killed", "adapter", "checkpoint-[68]", "checkpoint-1[46]"))
    assert events_of(killed, Start)[-1].resumed_from in ("checkpoint-4", "checkpoint-12")
    assert adapter_hash(killed) == adapter_hash(whole)
