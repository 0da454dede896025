"""Steps of many widths from traces at two: exact against a traced one, and what their order does to reserved memory."""

import dataclasses
import functools

import pytest
from tiny_models import config_values, settings

from finetune.card import find_card
from finetune.memory import device_peak
from finetune.memory.allocator_replay import MicroBatchEvents, micro_batch_widths, replay, replay_widths
from finetune.memory.device_peak import make_forecast
from finetune.memory.forecast import RowShape
from finetune.memory.ledger import batch_of
from finetune.memory.simulate import simulate
from finetune.memory.trace import RELEASED, NotRepeated, Trace
from finetune.model.transformers_config import config_from
from finetune.units import MIB

VALUES = config_values(num_hidden_layers=4, vocab_size=8192, hidden_size=512, intermediate_size=2048)
CARD = dataclasses.replace(find_card("rtx-4090"), context_bytes=200 * MIB, context_uncertainty_bytes=0)
LENGTHS = [60 + 11 * number % 1300 for number in range(0, 2000, 7)] + [1900, 2048]


@functools.cache
def _cached(key):
    width, rows, more = key
    recipe = settings(per_device_train_batch_size=rows, **dict(more))
    return simulate(config_from(VALUES, recipe), recipe, batch_of(recipe, RowShape(width)), (8, 6)).trace()


def traced(width, rows=1, **more):
    return _cached((width, rows, tuple(more.items())))


def sizes(events):
    return [size for _, size in events if size != RELEASED]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"rows": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"attn_implementation": "eager"}, marks=pytest.mark.slow),
        pytest.param({"activation_checkpointing": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_width_between_is_what_a_dry_run_of_it_gives(more):
    batches = MicroBatchEvents(traced(2048, **more), 2048, traced(1024, **more), 1024)
    assert sizes(batches.at(1536)) == sizes(traced(1536, **more).parts["micro-batch"])
    odd, real = sizes(batches.at(777)), sizes(traced(777, **more).parts["micro-batch"])
    assert len(odd) == len(real) and sum(map(abs, map(int.__sub__, odd, real))) < 2e-3 * sum(real)  # kernels round some up


def test_traces_of_other_steps_are_not_taken_for_one_of_another_width():
    events = [(1, 100), (2, 50), (1, RELEASED), (2, RELEASED)]
    with pytest.raises(NotRepeated):
        MicroBatchEvents(Trace({"micro-batch": events}), 2, Trace({"micro-batch": [events[1], events[3]]}), 1)
    swapped = [(1, 50), (2, 50), (2, RELEASED), (1, RELEASED)]  # what is released at once has no order
    batches = MicroBatchEvents(Trace({"micro-batch": events}), 2, Trace({"micro-batch": swapped}), 1)
    assert batches.at(4)[:2] == [(1, 200), (2, 50)]


def test_scores_with_a_sink_have_their_size_at_every_width():
    wide, narrow = ([(1, 64 * width * (width + 1)), (2, 4 * width + 512)] for width in (901, 450))
    batches = MicroBatchEvents(Trace({"micro-batch": wide}), 901, Trace({"micro-batch": narrow}), 450)
    assert all(sizes(batches.at(width)) == [64 * width * (width + 1), 4 * width + 512] for width in range(1, 902))


def test_the_longest_rows_come_where_a_run_puts_them():
    widths = micro_batch_widths(LENGTHS, rows=2, longest=2000, accumulation=4)
    assert (widths[0], widths[7]) == (1900, 2000)
    assert widths == micro_batch_widths(LENGTHS, rows=2, longest=2000, accumulation=4) and len(set(widths)) > 10


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
def test_rows_of_one_length_reserve_what_the_step_does(expandable):
    wide = traced(2048)
    batches = MicroBatchEvents(wide, 2048, traced(1024), 1024)
    step = replay(wide, expandable=expandable)
    assert replay_widths(wide, batches, [2048] * 6, 2, expandable=expandable) == step.reserved["train"]


def test_growing_widths_fragment_segments_and_expandable_ones_hardly():
    wide = traced(2048)
    batches, rising = MicroBatchEvents(wide, 2048, traced(1024), 1024), sorted(micro_batch_widths(LENGTHS, 1, 2048, 4))
    free, fixed = (replay_widths(wide, batches, rising, 4, expandable=expandable) for expandable in (True, False))
    alone = replay(wide, expandable=False).reserved["train"]
    falling = replay_widths(wide, batches, rising[::-1], 4, expandable=False)
    assert fixed > 1.5 * alone and falling < 1.05 * alone and free < 1.1 * alone


@pytest.mark.slow
@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
def test_the_plan_says_what_uneven_rows_do_and_never_forecasts_less(expandable, monkeypatch, tmp_path):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(device_peak, "expandable_segments", lambda *_: expandable)
    recipe = settings(per_device_train_batch_size=1)

    def forecast_of(recipe, *lengths):
        return make_forecast(VALUES, recipe, CARD, rows=RowShape(2048), lengths=lengths)

    before = forecast_of(recipe)
    for _ in range(2):  # then from the cache
        after = forecast_of(recipe, *LENGTHS)
        assert after.reserved_bytes >= before.reserved_bytes and after.peak_high_bytes >= before.peak_high_bytes
        (note,) = set(after.notes) - set(before.notes)
        assert note.startswith("rows of uneven length") and ("expandable segments" in note) is expandable
    packed = recipe.model_copy(update={"packing": True})
    assert forecast_of(packed, *LENGTHS) == forecast_of(packed) and forecast_of(recipe, 7, 7) == before
