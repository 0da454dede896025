"""Offloaded 4-bit layers come from the model's file of quantised weights, and with `nvme` they stay there."""

import pytest
import tiny_training
from offloaded import RECOMPUTED, Late, built, same, save_base, trace_of
from tiny_training import settings_for

from finetune.model import put_away
from finetune.model.layer_offloading import StoredRuns, offloading_of, run_bytes, spots_of
from finetune.model.put_away import load_base
from finetune.model.quantised_files import folder, kept


@pytest.fixture
def said(monkeypatch):
    """What a run is told while it loads its base as runs do."""
    found = []
    monkeypatch.setattr(
        tiny_training, "build_base", lambda settings, config, **_: load_base(settings, config, "cpu", found.append)
    )
    return found


def nf4(base, **changes):
    return settings_for(base, **RECOMPUTED | {"dtype": "bfloat16", "load_in_4bit": True} | changes)


def away(settings, how):
    return settings.model_copy(update={"layer_offloading": how, "offloaded_layers": 2})


@pytest.mark.parametrize("how", ["cpu", "nvme"])
def test_losses_and_adapters_are_those_of_resident_layers_at_the_first_start_and_the_second(tmp_path, said, how):
    settings = nf4(save_base(tmp_path, layers=3))
    resident = trace_of(built(settings), settings)
    assert said == [] and kept() == []
    for _ in ("first", "second"):
        model = built(away(settings, how), Late())
        assert same(trace_of(model, settings), resident)
    assert len(said) == len(kept()) == 1


def test_with_nvme_a_layers_run_is_read_where_the_file_has_it(tmp_path, said):
    settings = away(nf4(save_base(tmp_path, layers=3), use_dora=True), "nvme")
    model = built(settings)
    offloading = offloading_of(model)
    assert type(offloading._runs) is StoredRuns
    assert not (folder().parent / "layers").exists()
    [store] = kept()
    whole = store.read_bytes()
    for place, layer in enumerate(offloading._layers):
        offloading.have(place)
        start, size = offloading._runs._spans[place]
        assert size == run_bytes(spots_of(layer))
        assert bytes(offloading.buffers[place][:size].numpy()) == whole[start : start + size]


def test_without_room_for_the_file_the_layers_come_from_the_checkpoint(tmp_path, said, monkeypatch):
    settings = nf4(save_base(tmp_path, layers=3))
    resident = trace_of(built(settings), settings)
    monkeypatch.setattr(put_away, "free_disk_bytes", lambda path: 0)
    assert same(trace_of(built(away(settings, "cpu"), Late()), settings), resident)
    assert kept() == [] and "0 B are free" in said[0] and "quantised again at every start" in said[0]
