"""A run with compiled layers says what was compiled, how often and for how long."""

import pytest

from finetune.events import Compiled, RunWarning, Step, read_events

pytestmark = [pytest.mark.slow, pytest.mark.compiler]


def test_a_run_counts_graphs_recompilations_and_graph_breaks(make_run, train):
    run = make_run(
        "torch_compile=true", "max_steps=6", "effective_batch_size=4", "per_device_train_batch_size=2", "packing=false",
        "activation_checkpointing=false",
    )  # fmt: skip
    train.whole(run)
    events = list(read_events(run.events))
    compiled = [event for event in events if isinstance(event, Compiled)]
    assert {event.padded_tokens % (2 * 64) for event in events if isinstance(event, Step)} == {0}
    last = compiled[-1]
    assert last.graphs == 1 and last.graph_breaks == 0 and last.compile_s > 0
    assert last.recompiles == 0
    assert last.step < 6 and not any(isinstance(event, RunWarning) and "compiled" in event.message for event in events)
