"""What torch reserves at most, and a budget below that: the replayed allocator returns cached blocks and continues."""

import dataclasses

import pytest
from tiny_models import config_values, settings

from finetune.card import find_card
from finetune.memory import device_peak
from finetune.memory.allocator_replay import Replay
from finetune.memory.device_peak import make_forecast
from finetune.memory.forecast import RowShape
from finetune.memory.ledger import LargestStep
from finetune.planner.plan import verdict_of
from finetune.units import GIB, MIB

#: From nothing that could fit to what surely does.
ORDER = ["does not fit", "tight", "fits"]
CARD = dataclasses.replace(find_card("rtx-4090"), context_bytes=200 * MIB, context_uncertainty_bytes=0)


@pytest.fixture(params=[True, False], ids=["expandable", "segments"])
def forecast_of(request, monkeypatch, tmp_path):
    """forecast_of(budget) for packed rows: the same length in every micro-batch."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(device_peak, "expandable_segments", lambda *_: request.param)
    values = config_values(num_hidden_layers=4, hidden_size=256, intermediate_size=1024, vocab_size=8192)
    recipe = settings(packing=True, per_device_train_batch_size=1)
    return lambda budget=None, **more: make_forecast(
        values, recipe.model_copy(update=more), CARD, rows=RowShape(2048), budget_bytes=budget
    )


def test_more_budget_never_gives_a_worse_verdict(forecast_of):
    free = forecast_of()
    least, most = free.peak_low_bytes, free.peak_high_bytes
    budgets = [round(least - MIB + (most - least + 2 * MIB) * part / 16) for part in range(17)]
    forecasts = [forecast_of(budget) for budget in budgets]
    verdicts = [verdict_of(forecast, budget) for forecast, budget in zip(forecasts, budgets, strict=True)]
    assert verdicts == sorted(verdicts, key=ORDER.index)
    assert verdicts[0] == "does not fit" and verdicts[-1] == "fits" and "tight" in verdicts
    assert any(forecast.at_limit for forecast in forecasts) and verdict_of(free, least) == "does not fit"


def test_rows_of_uneven_length_without_expandable_segments_stay_tight(forecast_of, request):
    free = forecast_of(packing=False)
    at_limit = forecast_of(free.peak_high_bytes - 1, packing=False).at_limit
    assert at_limit is device_peak.expandable_segments()


def test_whole_blocks_count_as_forecast_where_segments_are_fixed_so_that_no_run_seems_to_exceed_it(monkeypatch, tmp_path):
    """Windows and WSL: torch counts a block whole, which the dry run's tensors do not; later plans were raised by that."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(device_peak, "expandable_segments", lambda *_: False)
    replays, replayed = [], LargestStep.replayed
    monkeypatch.setattr(LargestStep, "replayed", lambda *step, **how: replays.append(replayed(*step, **how)) or replays[-1])
    values = config_values(num_hidden_layers=4, hidden_size=384, intermediate_size=1000, vocab_size=9000)
    forecast = make_forecast(values, settings(), CARD, rows=RowShape(1000))
    tensors = LargestStep(values, settings(), RowShape(1000)).dry_run().allocated_bytes
    assert forecast.allocated_bytes == forecast.peaks["train"] == replays[-1].allocated["train"] > tensors


@pytest.mark.parametrize(
    ("expandable", "even", "most_gib"), [(False, True, 20.6), (False, False, 22.8), (True, True, 21.012), (True, False, 21.012)]
)
def test_the_most_is_the_replays_and_for_uneven_rows_in_fixed_segments_at_least_the_interval(
    monkeypatch, expandable, even, most_gib
):
    monkeypatch.setattr(device_peak, "expandable_segments", lambda *_: expandable)
    replay = Replay({"train": 20 * GIB}, {"train": round(20.6 * GIB)})
    _, likely, most = device_peak._reserved(20 * GIB, find_card("rtx-4090"), replay, even=even)
    assert likely == replay.reserved_bytes
    assert most == pytest.approx(most_gib * GIB * (1 + device_peak.DRY_RUN_ERROR))
