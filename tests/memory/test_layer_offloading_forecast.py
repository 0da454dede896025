"""Offloaded layers in the forecast: what leaves the card, in a real run and in its dry run, and at any depth."""

import pytest
from real_run import by_phase, forecast, measured, planned, save_model
from test_depth import both_ways
from tiny_models import config_values, settings

from finetune.card import find_card
from finetune.card.card import PROCESS_BYTES
from finetune.memory.caching_allocator import MIN_BLOCK
from finetune.memory.device_peak import make_forecast
from finetune.memory.forecast import Batch, RowShape
from finetune.memory.ledger import LargestStep
from finetune.settings.compatibility import BUFFERS

ONE_ROW = Batch(1, 64, 63, held_out=Batch(1, 64, 63))
KINDS = {"16-bit": {"load_in_4bit": False}, "nf4": {}}
#: Tensors of a layer of 4-bit weights that leave the card: codes and three of their scales for each of 7 matrices.
MOST_TENSORS = 4 * 7


def offloading(layers, tier="cpu"):
    return {"layer_offloading": tier, "offloaded_layers": layers} if tier else {}


def dry(layers, **changes):
    return LargestStep(config_values(num_hidden_layers=layers), settings(**changes), RowShape(64)).dry_run()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_card_holds_two_buffers_in_place_of_all_layers(kind):
    resident, offloaded = dry(6, **KINDS[kind]), dry(6, **KINDS[kind], **offloading(6))
    layer_bytes = offloaded.largest_offloaded_bytes
    assert offloaded.offloaded_bytes == offloaded.host_bytes - resident.host_bytes == 6 * layer_bytes
    rounded = 6 * MOST_TENSORS * MIN_BLOCK + 6 * 4096
    for phase in ("train", "eval", "save"):
        assert abs(resident.peaks[phase] - offloaded.peaks[phase] - (6 - BUFFERS) * layer_bytes) <= rounded


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layers"), [("16-bit", 7), ("nf4", 8)])
def test_a_few_layers_stand_for_an_odd_and_an_even_number(kind, layers):
    few, whole, _ = both_ways(layers=layers, batch=ONE_ROW, **KINDS[kind], **offloading(layers))
    assert few.depth.times and by_phase(few) == by_phase(whole)
    assert few.host == whole.host


@pytest.mark.slow
def test_some_resident_layers_add_their_weights():
    (_, four, _), (_, six, _) = (both_ways(layers=6, batch=ONE_ROW, **offloading(layers)) for layers in (4, 6))
    some = dry(6, **offloading(4))
    assert some.host_bytes == four.host.total()
    assert some.offloaded_bytes == 4 * some.largest_offloaded_bytes
    peaks = by_phase(four)
    assert {phase: some.peaks[phase] - dry(6, **offloading(6)).peaks[phase] for phase in ("eval", "save")} == {
        phase: peaks[phase] - by_phase(six)[phase] for phase in ("eval", "save")
    }


@pytest.mark.slow
def test_a_file_takes_disk_in_place_of_host_memory_and_the_same_of_the_card():
    config, card = config_values(num_hidden_layers=64), find_card("rtx-4090")
    host, file = (make_forecast(config, settings(**offloading(64, tier)), card, rows=RowShape(64)) for tier in ("cpu", "nvme"))
    run = dry(64, **offloading(64))
    assert host.peaks == file.peaks
    assert file.disk_bytes - host.disk_bytes == run.offloaded_bytes == 64 * run.largest_offloaded_bytes
    assert host.host_bytes >= PROCESS_BYTES + run.offloaded_bytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("16-bit", marks=pytest.mark.exhaustive), "nf4"])
def test_a_real_run_needs_what_its_dry_run_says_to_the_byte(tmp_path, kind):
    model, seen, expected = save_model("llama", tmp_path / "model"), {}, {}
    for tier in (False, "cpu"):
        (tmp_path / str(tier)).mkdir()
        changes = {"load_in_4bit": kind == "nf4", "activation_checkpointing": True, **offloading(3, tier)}
        run, plan = planned(model, tmp_path / str(tier), **changes)
        expected[tier], seen[tier] = forecast(plan), measured(run)
    for phase in ("forward", "loss", "loss backward", "backward", "optimizer", "save", "eval"):
        assert seen[False][phase] - seen["cpu"][phase] == expected[False][phase] - expected["cpu"][phase] > 0, phase
    assert abs(seen["cpu"]["load"] - expected["cpu"]["load"]) <= 0.005 * seen["cpu"]["load"]
