"""Memory of each rank under FSDP and DeepSpeed: the rules against arithmetic by hand, and properties for every model."""

import pytest
from tiny_models import config_values, settings

from finetune.card import Card
from finetune.memory.device_peak import make_forecast
from finetune.memory.forecast import RowShape
from finetune.memory.ledger import DryRun, LargestStep
from finetune.memory.sharding import Parameter, shard, units_of
from finetune.units import GIB, MIB

CARD = Card("some card", 24 * GIB, 24 * GIB, (8, 9), context_bytes=300 * MIB, source="catalogue")
KIB = 1024
#: Two layers of a frozen 16-bit matrix of 1,000 rows of 1 KiB and an fp32 adapter of 16 rows of 1 KiB; tables of 64 rows.
LAYER = (Parameter(1000, KIB, 2, False), Parameter(16, KIB, 4, True))
TABLE = (Parameter(64, KIB, 2, False),)
MODEL = {"layers.0": LAYER, "layers.1": LAYER, "embedding": TABLE, "head": TABLE}
#: A ledger for it, in KiB; 100 of the weights are no parameters, such as the quantisation states of 4-bit weights.
LEDGER = {
    "weights": 2 * 1000 + 2 * 64 + 100, "adapters": 32, "gradients": 32, "optimizer": 64, "activations": 500, "recomputed": 50,
    "loss": 1, "workspace": 10, "gathered": 0,
}  # fmt: skip
LAUNCHES = [
    {"strategy": "fsdp"},
    {"strategy": "fsdp", "offload": "cpu"},
    {"strategy": "deepspeed", "zero_stage": 2},
    {"strategy": "deepspeed", "zero_stage": 2, "offload": "cpu"},
    {"strategy": "deepspeed", "zero_stage": 3},
    {"strategy": "deepspeed", "zero_stage": 3, "offload": "cpu"},
    {"strategy": "deepspeed", "zero_stage": 3, "offload": "nvme", "nvme_path": "/nvme"},
]


def hand_run():
    parts = {name: size * KIB for name, size in LEDGER.items()}
    total = sum(parts.values())
    layers = {"layers.0": 1200 * KIB, "layers.1": 1200 * KIB, "outside the layers": total - 2400 * KIB}
    peaks = {"load": 2300 * KIB, "train": total, "eval": 0, "save": 2400 * KIB}
    return DryRun(parts, peaks, layers, host_bytes=7, parameters=1, method="by hand")


def on_cards(cards, model=MODEL, four_bit=False, dora=False, **launch):
    chosen = settings(load_in_4bit=four_bit, use_dora=dora, launch={"num_processes": cards, **launch})
    return shard(hand_run(), model, chosen)


def test_fsdp_on_two_cards_by_hand():
    rank = on_cards(2, strategy="fsdp")
    assert rank.parts["weights"] == (2 * 500 + 2 * 32 + 100) * KIB
    assert rank.parts["adapters"] == 2 * 8 * KIB and rank.parts["optimizer"] == 32 * KIB
    assert rank.parts["gradients"] == 32 * KIB  # whole until the last micro-batch
    assert rank.parts["gathered"] == (3 * 1016 + 2 * 16) * KIB  # layer, its buffer, the next layer's; gradients of two layers
    saved = (1000 + 64 + 16 + 32 - 3 * 1016 - 32) * KIB
    assert rank.peaks["train"] == hand_run().peaks["train"] - saved == rank.allocated_bytes
    assert rank.peaks["save"] == 2400 * KIB - saved and rank.peaks["eval"] == 0
    assert rank.peaks["load"] == (2160 + 1080) * KIB  # the full model, and one rank's shards


@pytest.mark.parametrize(("offload", "kept_kib"), [("none", 1080), ("cpu", 2 * 8)])
def test_of_4_bit_weights_each_card_loads_its_own_rows_beside_the_whole_adapters(offload, kept_kib):
    rank = on_cards(2, four_bit=True, strategy="fsdp", offload=offload)
    assert rank.peaks["load"] == (kept_kib + 32 + 100) * KIB  # its rows, or in host memory; adapters; what is not sharded
    assert on_cards(8, four_bit=True, strategy="fsdp", offload=offload).peaks["load"] < rank.peaks["load"]
    dora = on_cards(2, four_bit=True, dora=True, strategy="fsdp", offload=offload)  # computed from whole weights
    assert dora.peaks["load"] == on_cards(2, strategy="fsdp", offload=offload).peaks["load"]


@pytest.mark.parametrize(("offload", "kept_bytes"), [("none", MIB + 2 * 32 * KIB), ("cpu", 0)])
def test_loading_has_one_matrix_in_16_bit_on_a_card_beside_the_ranks_rows(offload, kept_bytes):
    codes = Parameter(2**20, 2, 2, False)  # a column of four codes to an element
    model = {"layers.0": (codes,), "embedding": TABLE, "head": TABLE}
    rank = on_cards(2, model, four_bit=True, strategy="fsdp", offload=offload)
    state_bytes = hand_run().parts["weights"] - codes.size_bytes - 2 * 64 * KIB
    assert rank.peaks["load"] == kept_bytes + (2 + 8) * MIB + state_bytes


def test_rows_that_do_not_divide_are_padded_on_every_card():
    odd = {"layers.0": (Parameter(10, KIB, 2, False),), "head": (Parameter(3, KIB, 2, False),)}
    run = hand_run()
    rank = shard(run, odd, settings(launch={"num_processes": 4, "strategy": "fsdp"}))
    assert run.parts["weights"] - rank.parts["weights"] == (10 - 3 + 3 - 1) * KIB
    assert rank.parts["gathered"] == (4 + 3 * 12) * KIB  # no embedding: tied to the output layer and gathered from the start


def test_zero_2_shards_the_optimizer_alone_and_zero_3_the_weights_too():
    two = on_cards(2, strategy="deepspeed", zero_stage=2)
    three = on_cards(2, strategy="deepspeed", zero_stage=3)
    buffers = 2 * 512 * 512 * 2 + 16 * KIB  # hidden is 512: twice its square in 16 bit; the step's gradient of half of it
    assert two.parts["weights"] == hand_run().parts["weights"] and two.parts["adapters"] == 32 * KIB
    assert two.parts["optimizer"] == three.parts["optimizer"] == (32 + 16) * KIB  # half the states, half of a copy in fp32
    assert two.parts["gathered"] == buffers
    assert three.parts["weights"] == (2 * 500 + 2 * 32 + 100) * KIB
    assert three.parts["gathered"] == 2160 * KIB + buffers  # a model this small stays gathered


def test_offload_moves_a_ranks_shards_to_the_host_memory_of_its_own_machine():
    there = on_cards(2, strategy="fsdp", offload="cpu")
    assert there.parts["weights"] == 100 * KIB and there.parts["adapters"] == there.parts["optimizer"] == 0
    pinned = 2 * (512 + 8) + 2 * 32  # in powers of two
    assert there.host_bytes == 2 * (7 + (pinned + 3 * 16) * KIB)
    assert there.peaks["load"] == 2300 * KIB
    per_machine = on_cards(4, strategy="fsdp", offload="cpu", num_machines=2, main_process_ip="10.0.0.1")
    assert 2 * per_machine.host_bytes == on_cards(4, strategy="fsdp", offload="cpu").host_bytes


@pytest.mark.parametrize("launch", LAUNCHES)
def test_more_cards_never_take_more_of_each(launch):
    peaks = [on_cards(cards, **launch).peaks for cards in (2, 4, 8)]
    for fewer, more in zip(peaks, peaks[1:], strict=False):
        assert all(more[phase] <= fewer[phase] for phase in fewer)


@pytest.mark.slow
@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_ledger_of_a_real_model_sums_to_the_peak_of_training(launch):
    recipe = settings(launch={"num_processes": 2, **launch})
    forecast = make_forecast(config_values(), recipe, CARD, rows=RowShape(64))
    assert sum(forecast.parts.values()) == forecast.allocated_bytes == forecast.peaks["train"]
    assert min(forecast.parts.values()) >= 0
    assert forecast.peak_low_bytes < forecast.peak_bytes < forecast.peak_high_bytes
    assert any("not measured on several GPUs" in note for note in forecast.notes)


def test_the_dry_run_is_the_same_for_every_strategy_but_zero_3_and_made_once(home):
    ways = [{}, {"num_processes": 2}, {"num_processes": 2, "strategy": "fsdp"}, {"num_processes": 2, "strategy": "deepspeed"}]
    recipes = [settings(launch=way) for way in ways]
    runs = []
    for number, recipe in enumerate(recipes):
        runs.append(LargestStep(config_values(num_hidden_layers=4), recipe, RowShape(64)).dry_run())
        assert len(list((home / "cache" / "forecasts").glob("*.json"))) == 1, number
    assert all(run == runs[0] for run in runs)
    for cached in (home / "cache" / "forecasts").glob("*.json"):
        cached.unlink()
    assert LargestStep(config_values(num_hidden_layers=4), recipes[2], RowShape(64)).dry_run() == runs[0]


def test_units_have_every_parameter_once_and_are_cached(home):
    values, recipe = config_values(tie_word_embeddings=True), settings(launch={"num_processes": 2, "strategy": "fsdp"})
    units = units_of(values, recipe)
    assert list(units) == [*(f"layers.{number}" for number in range(8)), "head", "rest"]
    assert units == units_of(values, recipe)
    adapters = sum(parameter.size_bytes for unit in units.values() for parameter in unit if parameter.trained)
    # rank 8 in fp32: q and o 256 x 256, k and v 256 x 128, gate, up and down 256 x 512, in each of 8 layers
    assert adapters == 8 * 8 * 4 * (2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 512))
    table = units["head"]
    assert [parameter.size_bytes for parameter in table] == [1024 * 256 * 2]
