"""`finetune doctor --measure`: rates of this machine, and the plans that use them."""

import json
from dataclasses import replace

from finetune.card import find_card
from finetune.card.measured import Rates, conditions_of, store_rates, with_measured_rates
from finetune.card.nvidia import Device
from finetune.doctor import rates as measuring
from finetune.files import cache_dir
from finetune.planner.history import read_history

CARD = find_card("rtx-4090")
DEVICE = Device(CARD.name, CARD.total_bytes, CARD.free_bytes, (8, 9), None, (), driver="580.1", power_limit_w=450.0)
RATES = Rates(140e12, 900e9, 4.5e-6, conditions_of(DEVICE), "2026-11-28", 120e12, 24e9, 6e9)


def test_the_cpu_is_measured_and_its_plans_use_the_rates(monkeypatch):
    monkeypatch.setattr(measuring, "MEASURED_S", 0.01)
    monkeypatch.setattr(measuring, "usable_devices", tuple)
    (finding,) = measuring.measure_rates(lambda _: None)
    assert finding.state == "ok", finding
    stored = json.loads((cache_dir() / "rates.json").read_text())["cpu"]
    card = find_card("cpu")
    assert (card.bf16_flops, card.launch_s) == (stored["flops"], stored["launch_s"])
    assert "rates: measured here" in card.reason and stored["conditions"].startswith("torch ")


def test_a_plan_has_the_rates_measured_on_its_gpu_unless_the_conditions_have_changed():
    store_rates(CARD, RATES)
    card = with_measured_rates(CARD, DEVICE)
    assert (card.bf16_flops * card.flops_share, card.bandwidth_bytes_s * card.bandwidth_share) == (140e12, 900e9)
    assert (card.attention_flops, card.pcie_bytes_s, card.launch_s) == (120e12, 24e9, 4.5e-6)
    for now in (replace(DEVICE, driver="581.0"), replace(DEVICE, power_limit_w=300.0)):
        card = with_measured_rates(CARD, now)
        assert card.bf16_flops == CARD.bf16_flops and card.rates_measured_at == ""
        assert "driver 580.1, power limit 450 W; now torch" in card.reason and "measure again" in card.reason


def test_a_rate_above_the_catalogues_by_more_than_a_tenth_is_told_apart():
    shares = measuring._shares_of_listed(replace(RATES, flops=1.2 * CARD.bf16_flops), CARD)
    assert [name for name, share in shares.items() if share > measuring.MOST_OF_LISTED] == ["products"]


def test_times_of_runs_that_were_modelled_with_other_rates_do_not_correct_a_plan():
    row = {"card": "x", "modelled_step_s": 1.0, "measured_step_s": 2.0, "rates_measured_at": ""}
    (cache_dir() / "history.jsonl").write_text(json.dumps(row) + "\n")
    assert read_history("x").speed_factor == 2.0 and read_history("x", "2026-11-28").speed_factor is None
