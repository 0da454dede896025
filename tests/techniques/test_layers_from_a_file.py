"""Offloaded 4-bit layers come from the model's file of quantised weights, and with `nvme` they stay there."""

import pytest
import tiny_training
import torch
from offloaded import RECOMPUTED, Late, built, equal_traces, save_base, trace_of
from tiny_training import settings_for

from finetune.layers.layer_offloading import QuantisedFileStorage, offloading_of
from finetune.layers.quantised_files import complete_models, folder
from finetune.layers.quantised_store import Store
from finetune.model import quantised_cache
from finetune.model.quantised_cache import load_base


@pytest.fixture
def messages(monkeypatch):
    """Messages of loading the base as runs do."""
    messages = []
    monkeypatch.setattr(
        tiny_training, "build_base", lambda settings, config, **_: load_base(settings, config, "cpu", messages.append)
    )
    return messages


def nf4(base, **changes):
    return settings_for(base, **RECOMPUTED | {"dtype": "bfloat16", "load_in_4bit": True} | changes)


def offloaded(settings, storage):
    return settings.model_copy(update={"layer_offloading": storage, "offloaded_layers": 2})


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["cpu", "nvme"])
def test_losses_and_adapters_are_those_of_resident_layers_at_the_first_start_and_the_second(tmp_path, messages, storage):
    settings = nf4(save_base(tmp_path, layers=3))
    resident = trace_of(built(settings), settings)
    assert messages == [] and complete_models() == []
    for _ in ("first", "second"):
        model = built(offloaded(settings, storage), Late())
        assert equal_traces(trace_of(model, settings), resident)
    assert len(messages) == len(complete_models()) == 1


def test_with_nvme_a_layer_is_read_from_its_file(tmp_path, messages):
    settings = offloaded(nf4(save_base(tmp_path, layers=3), use_dora=True), "nvme")
    model = built(settings)
    offloading = offloading_of(model)
    assert type(offloading._storage) is QuantisedFileStorage
    assert not (folder().parent / "layers").exists()
    store = Store(*complete_models())
    for index, path in enumerate(offloading._storage._paths):
        offloading.ensure_on_device(index)
        for slot in offloading._layouts[index]:
            assert torch.equal(slot.view(offloading.buffers[index]), store.rows(f"{path}.{slot.name}"))


def test_without_disk_space_for_the_file_layers_come_from_the_checkpoint(tmp_path, messages, monkeypatch):
    settings = nf4(save_base(tmp_path, layers=3))
    resident = trace_of(built(settings), settings)
    monkeypatch.setattr(quantised_cache, "free_disk_bytes", lambda path: 0)
    assert equal_traces(trace_of(built(offloaded(settings, "cpu"), Late()), settings), resident)
    assert complete_models() == [] and "0 B are free" in messages[0] and "quantised again at every start" in messages[0]
