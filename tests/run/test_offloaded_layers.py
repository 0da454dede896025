"""A run with offloaded layers: its adapter, held-out losses and answers are those of a resident run, also after a kill."""

import json

import pytest
from child_faults import killed_before_seal
from conftest import adapter_hash, copy_of, fresh_copy

from finetune.evaluate.answerer import Answerer
from finetune.events import Evaluation, Sample, Step, read_events
from finetune.run.seal import newest_verified

pytestmark = pytest.mark.slow
RECOMPUTED = ["activation_checkpointing=true", "activation_checkpointing_every_n_layers=1"]
RECOMPUTED += ["lora_dropout=0.1", "eval_steps=4", "sample_answers=1"]
AWAY = ["layer_offloading=cpu", "offloaded_layers=5"]
FILE = ["layer_offloading=nvme", "offloaded_layers=4"]


@pytest.fixture(scope="module")
def resident(make_run, train):
    return train.whole(make_run(*RECOMPUTED))


def recorded_values(run):
    """What a run tells of its result, without seconds and bytes."""
    seen = {}
    for event in read_events(run.events):
        if isinstance(event, Step):
            seen["step", event.step] = event.loss, event.grad_norm
        elif isinstance(event, Evaluation):
            seen["evaluation", event.step] = event.eval_loss, event.eval_token_accuracy
        elif isinstance(event, Sample):
            seen["sample", event.step, event.prompt] = event.answer
    return seen


@pytest.mark.parametrize("how", [AWAY, FILE], ids=["cpu", "nvme"])
def test_losses_answers_and_the_adapter_are_those_of_a_resident_run(resident, make_run, train, how):
    run = train.whole(make_run(*RECOMPUTED, *how))
    assert recorded_values(run) == recorded_values(resident) and len(recorded_values(run)) > 8 + 2
    assert adapter_hash(run) == adapter_hash(resident)


@pytest.mark.parametrize(
    ("first", "then"),
    [("cpu", "nvme"), *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in ((False, "cpu"), ("cpu", False)))],
)
def test_a_killed_run_continues_from_and_to_a_resident_one(resident, tmp_path, train, first, then):
    run = fresh_copy(resident, tmp_path / "run")
    change_plan(run, resident, first)
    assert train(run, killed_before_seal(6)) == 137
    assert newest_verified(run.checkpoints)[0].step == 4
    change_plan(run, resident, then)
    train.whole(run)
    assert adapter_hash(run) == adapter_hash(resident)


def change_plan(run, resident, how):
    """Offload all layers in this way, or none, as in the resident run's plan."""
    plan = json.loads(resident.plan.read_text())
    plan["plan"].update({"layer_offloading": how, "offloaded_layers": 5} if how else {})
    run.plan.write_text(json.dumps(plan))


def test_answers_of_the_result_stream_the_layers_too(resident, tmp_path):
    run, answers = copy_of(resident, tmp_path / "run"), []
    for how in (False, "cpu"):
        change_plan(run, resident, how)
        answerer = Answerer(run)
        question = answerer.prompt_ids([{"role": "user", "content": "Where is my parcel?"}])
        answers.append(answerer.answer([question], max_new_tokens=8, with_special_tokens=False))
    assert answers[0] == answers[1]
