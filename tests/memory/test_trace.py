"""The events of all layers from a dry run of a few, replayed through the caching allocator."""

import pytest
from test_depth import both_ways
from tiny_models import config_values, settings

from finetune.memory.allocator_replay import replay
from finetune.memory.forecast import RowShape
from finetune.memory.ledger import LargestStep


def traces(layers=7, **more):
    """Traces from a few layers and from all."""
    deep, full, method = both_ways(layers=layers, **more)
    assert f"of {layers} layers" in method
    return deep.trace(), full.trace()


@pytest.mark.parametrize(
    "more",
    [
        {"activation_checkpointing": True},
        *(
            pytest.param(more, marks=pytest.mark.slow)
            for more in (
                {"activation_checkpointing": False}, {"activation_checkpointing": False, "int8_activations": True},
                {"optim": "adamw_8bit", "lora_r": 64}, {"layer_offloading": "cpu", "offloaded_layers": 7},
                {"kind": "gemma2", "layers": 8},
            )
        ),
        *(
            pytest.param(more, marks=pytest.mark.exhaustive)  # test_depth.py has the peaks of each
            for more in (
                {"gradient_accumulation_steps": 1}, {"activation_checkpointing": "selective"}, {"use_dora": True},
                {"load_in_4bit": False, "load_in_8bit": True}, {"load_in_4bit": False, "optim": "adamw_torch"},
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_few_layers_reserve_what_all_do(more):
    deep, full = traces(**more)
    assert deep.warm_up == full.warm_up
    for expandable in (True, False):
        assert replay(deep, expandable=expandable) == replay(full, expandable=expandable)


@pytest.mark.slow
def test_every_release_is_of_something_live_and_only_what_lasts_is_left():
    deep, full = traces()
    assert {part: len(events) for part, events in deep.parts.items()}.keys() == full.parts.keys()
    for trace in (deep, full):
        live = set()
        for events in trace.parts.values():
            for number, size in events:
                assert (number in live) is (size < 0)
                live ^= {number}
        assert trace.persistent <= live


@pytest.mark.slow
def test_a_limit_at_the_reserved_peak_changes_nothing():
    deep, _ = traces()
    free = replay(deep, expandable=False)
    assert replay(deep, expandable=False, limit=free.reserved_bytes) == free


def test_what_cannot_be_replayed_is_not_guessed(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    for more in ({"activation_checkpointing": "offload"}, {"activation_checkpointing_every_n_layers": 2}):
        assert LargestStep(config_values(), settings(**more), RowShape(64)).replayed(expandable=False) is None
    step = LargestStep(config_values(num_hidden_layers=4), settings(), RowShape(64))
    assert step.replayed(expandable=False) == step.replayed(expandable=False)
