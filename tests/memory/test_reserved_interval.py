"""What torch reserves at most: what the replay says; for uneven rows in fixed segments no less than without a replay."""

import platform

import pytest

from finetune.card import find_card
from finetune.memory import device_peak
from finetune.memory.allocator_replay import Replay
from finetune.memory.device_peak import with_margin_of
from finetune.memory.forecast import Forecast, RowShape
from finetune.memory.ledger import LargestStep
from finetune.model.configuration import read_config
from finetune.planner.planning import plan_recipe, without_rows
from finetune.recipe import load_recipe

GIB = 2**30


@pytest.mark.parametrize(
    ("expandable", "even", "most_gib"), [(False, True, 20.6), (False, False, 22.8), (True, True, 21.012), (True, False, 21.012)]
)
def test_the_most_is_the_replays_and_for_uneven_rows_in_fixed_segments_at_least_the_interval(
    monkeypatch, expandable, even, most_gib
):
    monkeypatch.setattr(device_peak, "expandable_segments", lambda *_: expandable)
    replay = Replay(reserved_bytes=round(20.6 * GIB), allocated_bytes=20 * GIB, retries=0)
    _, likely, most = device_peak._reserved(20 * GIB, find_card("rtx-4090"), replay, even=even)
    assert likely == replay.reserved_bytes
    assert most == pytest.approx(most_gib * GIB * (1 + device_peak.DRY_RUN_ERROR))


def test_what_is_only_compared_reserves_the_chosen_plans_share_but_not_less_than_its_replay_nor_more_than_its_interval():
    card = find_card("rtx-4090")
    around = (card.context_bytes or 0) + card.context_uncertainty_bytes

    def forecast(allocated, reserved, high, **more):
        return Forecast(allocated, reserved, reserved, allocated, high + around, {}, {"train": allocated}, **more)

    def scaled(other):
        return with_margin_of(other, forecast(100, 110, 112), card).peak_high_bytes - around

    assert scaled(forecast(200, 216, 233)) == 224
    assert scaled(forecast(200, 216, 220)) == 220
    assert scaled(forecast(2000, 2250, 2330, reserved_peaks={"train": 2250})) == 2295


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], "the upper end"),
        pytest.param(
            ["activation_checkpointing=true", "activation_checkpointing_every_n_layers=3"], "the upper end",
            marks=pytest.mark.exhaustive,
        ),
        (["packing=true", "activation_checkpointing_every_n_layers=1"], "by a replay of torch's allocator"),
    ],
    ids=["as it is", "every third layer", "packed"],
)  # fmt: skip
def test_under_wsl_the_upper_end_of_7b_4090_is_1_5_gib_lower_by_the_replay_and_says_so(monkeypatch, tmp_path, overrides, text):
    monkeypatch.setattr(platform, "release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    plan = plan_recipe(load_recipe("7b-4090", overrides), find_card("rtx-4090"), without_rows)
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(LargestStep, "replayed", lambda *_, **__: None)
    before = device_peak.make_forecast(
        read_config(plan.settings), plan.settings, plan.card, rows=RowShape(plan.settings.max_length)
    )
    assert before.allocated_bytes < plan.forecast.allocated_bytes < 1.005 * before.allocated_bytes  # whole blocks
    assert before.peak_high_bytes - plan.forecast.peak_high_bytes > 1.5 * GIB
    assert plan.headroom_bytes == plan.budget_bytes - plan.forecast.peak_high_bytes and plan.verdict == "fits"
    (note,) = [note for note in plan.forecast.notes if "more than allocated" in note]
    assert text in note and "replay" in note and note in plan.as_json()["forecast"]["notes"]
