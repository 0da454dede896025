"""A run with compiled layers: what it says of compiling, its results beside the lean run's, and its bits after a resume."""

import pytest
from conftest import adapter_hash, copy_of, events_of, fresh_copy
from torch._inductor import compile_fx

from finetune.events import Compiled, RunWarning, Sample, Start, Step

pytestmark = [pytest.mark.slow, pytest.mark.compiler]
RECIPE = [
    "max_steps=6", "effective_batch_size=4", "per_device_train_batch_size=2", "packing=false", "activation_checkpointing=false",
    "sample_answers=2", "eval_steps=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(make_run, train):
    return train.whole(make_run("torch_compile=true", *RECIPE))


def losses(run):
    return [event.loss for event in events_of(run, Step)]


def answers(run):
    return [event.answer for event in events_of(run, Sample)]


def test_a_run_counts_graphs_and_has_the_losses_and_answers_of_a_run_that_compiles_nothing(run, make_run, train):
    assert {event.padded_tokens % (2 * 64) for event in events_of(run, Step)} == {0}
    last = events_of(run, Compiled)[-1]
    assert last.graphs == 1 and last.graph_breaks == 0 and last.compile_s > 0
    assert last.recompiles == 0
    assert last.step < 6 and not any("compiled" in event.message for event in events_of(run, RunWarning))
    other = train.whole(make_run("torch_compile=false", *RECIPE))
    assert losses(run) == pytest.approx(losses(other), rel=1e-4)
    assert answers(run) and answers(run) == answers(other)


def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_same_bits(run, train, tmp_path):
    killed = train.whole(copy_of(run, tmp_path / "killed", "adapter", "checkpoint-[46]"))  # the first evaluation saves step 3
    assert events_of(killed, Start)[-1].resumed_from == "checkpoint-3" and adapter_hash(killed) == adapter_hash(run)


def test_a_run_whose_layers_do_not_compile_goes_on_with_lean_layers(run, train, tmp_path):
    def fault():
        def fails(*_arguments, **_named):
            raise RuntimeError("no such kernel")

        compile_fx.compile_fx = fails

    other = fresh_copy(run, tmp_path / "lean")
    assert train(other, fault) == 0
    [warning] = [event.message for event in events_of(other, RunWarning) if "compiled" in event.message]
    assert "no such kernel" in warning and "lean layers" in warning
    assert not events_of(other, Compiled) and losses(other) == pytest.approx(losses(run), rel=1e-4)
