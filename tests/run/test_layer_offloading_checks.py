"""Before a run with offloaded layers starts: host memory and the drive's room."""

import dataclasses

import psutil
import pytest

from finetune.card import find_card
from finetune.errors import DiskFull, MachineError
from finetune.memory.forecast import Forecast
from finetune.planner.plan import LayerCopies, Plan, Verdict
from finetune.planner.resources import check_host_memory, check_layer_offloading
from finetune.recipe import parse_recipe
from finetune.settings import resolve_plain
from finetune.units import GIB

COPIES = LayerCopies("nvme", 80, 80, GIB, GIB // 8, 2**40, 3e9, 40.0, 180.0, 80.0, 180.0, 240.0)


@pytest.fixture
def plan(monkeypatch):
    """A plan on a card of this machine, which has 8 GiB of host memory free."""
    memory = psutil.virtual_memory()._replace(total=16 * GIB, available=8 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr("finetune.card.card._cgroup", lambda *_: None)

    def make(**changes):
        forecast = Forecast(GIB, GIB, GIB, GIB, GIB, {"weights": GIB}, {"train": GIB})
        card = dataclasses.replace(find_card("rtx-4090"), source="measured")
        copies = dataclasses.replace(COPIES, **changes)
        recipe = parse_recipe(f"model_name_or_path: m\ndataset: d\nlayer_offloading: {copies.place}\n")
        settings = resolve_plain(recipe, activation_checkpointing=True)
        return Plan(settings, {}, card, Verdict.FITS, forecast=forecast, layer_copies=copies)

    return make


def test_too_little_host_memory_is_reported_before_anything_is_loaded(plan):
    with pytest.raises(MachineError, match=r"80 layers need 32.0 GiB of pinned host memory; 7.22 GiB are available") as error:
        check_layer_offloading(plan(place="cpu", weight_bytes=32 * GIB, pinned_bytes=32 * GIB))
    assert "layer_offloading=nvme" in error.value.fix
    with pytest.raises(MachineError, match="layer_offloading nvme: 80 layers need 9.00 GiB"):
        check_host_memory(plan(pinned_bytes=9 * GIB))
    check_layer_offloading(plan(place="cpu", weight_bytes=6 * GIB, pinned_bytes=6 * GIB))


def test_a_drive_without_room_for_the_file_is_reported(plan):
    with pytest.raises(DiskFull, match="the file of 80 layers needs"):
        check_layer_offloading(plan(weight_bytes=2**50))
    check_layer_offloading(plan(weight_bytes=GIB))
