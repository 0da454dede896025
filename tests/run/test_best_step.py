"""The step with the lowest held-out loss is the result, whenever the run was killed."""

import json
import random
import time

import pytest
from conftest import adapter_hash, copy_of, events_of, fresh_copy, kill, manifest

from finetune.errors import RecipeError
from finetune.events import Checkpoint, Evaluation, Result, RunWarning, Step, read_events
from finetune.recipe import load_recipe
from finetune.run.best import EvaluatedStep, best_of, evaluations, since_best
from finetune.run.seal import require_own_adapter
from finetune.run.state import read_state

#: Eight rows again and again: held-out loss falls while the form is learnt, then rises, as the held-out answer is another one.
#: The rate is low, so that rounding does not decide which step is the best.
LENGTHS = ("max_steps=24", "eval_steps=3", "save_steps=3", "effective_batch_size=8", "per_device_train_batch_size=8")
OVERFITS = (
    *LENGTHS, "save_total_limit=1", "sample_answers=0", "learning_rate=4e-4", "lr_scheduler_type=constant",
    "target_modules=all-linear",
)  # fmt: skip


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def make(make_run, tmp_path_factory):
    """make(*overrides) -> a run on rows with another answer than the held-out ones have."""
    folder, chance = tmp_path_factory.mktemp("rows"), random.Random(1)
    for split, answer in (("train", "red"), ("held", "blue")):
        rows = [(f"The {split} box {chance.randrange(10**6)} is ", answer) for _ in range(8)]
        lines = [json.dumps({"prompt": prompt, "completion": completion}) + "\n" for prompt, completion in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    data = (f"dataset.path={folder}/train.jsonl", f"dataset.eval_path={folder}/held.jsonl")
    return lambda *overrides: make_run(*data, *OVERFITS, *overrides)


@pytest.fixture(scope="module")
def overfitted(make, train):
    return train.whole(make())


def test_best_and_patience_follow_from_the_history_and_need_held_out_rows(make):
    history = [{"loss": 1.0, "step": 1}, *({"eval_loss": loss, "step": step} for step, loss in ((2, 3.0), (4, 1.0), (6, 1.0)))]
    evaluated = evaluations([*history, {"eval_loss": float("nan"), "step": 8}])
    assert best_of(evaluated) == EvaluatedStep(4, 1.0) and since_best(evaluated) == 2
    assert best_of(evaluated[3:]) is None and since_best(evaluated[3:]) == 1 and since_best([]) == 0
    with pytest.raises(RecipeError, match="needs held-out rows"):
        make("dataset.eval_path=null", "early_stopping_patience=2")
    with pytest.raises(RecipeError, match="needs evaluations"):
        load_recipe("tiny-cpu", ["patience=2", "eval_steps=0"])


@pytest.mark.slow
def test_the_best_step_is_the_result_as_of_a_run_that_ended_there_and_the_last_is_kept_as_a_checkpoint(overfitted, make, train):
    (result,) = events_of(overfitted, Result)
    losses = {event.step: event.eval_loss for event in events_of(overfitted, Evaluation)}
    best = min(losses, key=losses.get)
    assert best < 24 and losses[24] > losses[best]
    assert (result.step, result.eval_loss) == (best, losses[best])
    assert (result.last_step, result.last_eval_loss) == (24, losses[24])
    require_own_adapter(overfitted, overfitted.adapter)
    sealed = manifest(overfitted.adapter)
    assert (sealed["step"], sealed["eval_loss"]) == (best, losses[best])
    message = read_state(overfitted).message
    assert f"best at step {best} of 24" in message
    assert f"held-out loss {losses[best]:.4g} there and {losses[24]:.4g} at the last step" in message
    assert {path.name for path in overfitted.checkpoints.glob("checkpoint-*")} == {f"checkpoint-{best}", "checkpoint-24"}
    # The rate is constant, so that the steps up to there are the same.
    shorter = train.whole(make(f"max_steps={result.step}"))
    assert adapter_hash(shorter) == adapter_hash(overfitted)
    assert events_of(shorter, Result)[0].last_step == result.step


@pytest.mark.slow
def test_killed_at_any_moment_the_best_step_is_the_same(overfitted, tmp_path, train):
    times, run = [event.time_s for event in read_events(overfitted.events)], fresh_copy(overfitted, tmp_path / "run")
    pid = train.start(run)
    time.sleep(random.Random(0).uniform(0.3, times[-1] - times[0] + 0.5))
    kill(pid)
    train.whole(run)
    assert files_of(run.adapter) == files_of(overfitted.adapter)


@pytest.mark.slow
def test_a_damaged_best_checkpoint_is_named_and_the_next_best_wins(overfitted, tmp_path, train):
    run = copy_of(overfitted, tmp_path / "run", "adapter", "events.jsonl")
    (best,) = events_of(overfitted, Result)
    (run.checkpoints / f"checkpoint-{best.step}" / "optimizer.pt").write_bytes(b"")
    assert train(run) == 0
    (result,) = events_of(run, Result)
    assert result.step == result.last_step == 24
    assert any(f"step {best.step} had the lowest held-out loss" in warning.message for warning in events_of(run, RunWarning))


@pytest.mark.slow
def test_a_best_step_between_two_saves_gets_a_checkpoint(make, train):
    run = train.whole(make("save_steps=0"))
    losses, best = [event.eval_loss for event in events_of(run, Evaluation)], events_of(run, Result)[0]
    lowest_so_far = [3 * (at + 1) for at, loss in enumerate(losses) if loss < min(losses[:at], default=float("inf"))]
    assert [event.step for event in events_of(run, Checkpoint)] == lowest_so_far
    assert best.step == lowest_so_far[-1] < 24


@pytest.mark.slow
def test_patience_ends_the_run_and_the_best_step_is_the_same(overfitted, make, train):
    run = train.whole(make("early_stopping_patience=2"))
    (result,), (full,) = events_of(run, Result), events_of(overfitted, Result)
    assert events_of(run, Step)[-1].step == result.last_step == full.step + 6 < 24
    assert adapter_hash(run) == adapter_hash(overfitted)
    state = read_state(run)
    assert state.state == "finished" and state.message.startswith(f"stopped early at step {full.step + 6} of 24, after 2 evalu")
