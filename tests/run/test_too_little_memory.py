"""Too little memory is explained: host memory and the drive's room before a run, the GPU's beside what the plan expected."""

import dataclasses
from types import SimpleNamespace

import psutil
import pytest

from finetune.card import find_card
from finetune.errors import DiskFull, MachineError
from finetune.events import Memory, OutOfMemory
from finetune.memory.forecast import Forecast, PhaseForecast
from finetune.planner.plan import LayerCopies, Plan, Verdict
from finetune.planner.resources import check_host_memory, check_layer_offloading
from finetune.recipe import parse_recipe
from finetune.run.retry import explanation, out_of_memory_event
from finetune.settings import resolve_plain
from finetune.units import GIB

MESSAGE = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.55 GiB of which 1 GiB is free."


def described(error, forecast, memory):
    settings = SimpleNamespace(per_device_train_batch_size=1, max_length=8)
    plan = SimpleNamespace(settings=settings, forecast=SimpleNamespace(of_phase=lambda _: forecast))
    return out_of_memory_event(error, "train", plan, memory)


def test_the_message_stands_beside_forecast_and_measured_peaks_and_an_error_without_text_has_its_type():
    forecast = PhaseForecast(20 * GIB, 21 * GIB, None)
    memory = Memory(peak_allocated_bytes=22 * GIB, peak_reserved_bytes=23 * GIB)
    event = described(RuntimeError(f"{MESSAGE}\nException raised from malloc"), forecast, memory)
    assert explanation(event) == (
        f"{MESSAGE} The plan expected at most 20.0 GiB allocated and 21.0 GiB reserved in phase train; "
        "at the failure: 22.0 GiB allocated and 23.0 GiB reserved."
    )
    event = described(MemoryError(), PhaseForecast(GIB, None, None), Memory())
    assert explanation(event) == "MemoryError. The plan expected at most 1.00 GiB allocated in phase train."
    assert explanation(OutOfMemory(phase="load", message=MESSAGE)) == MESSAGE


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


def test_too_little_host_memory_or_room_on_the_drive_is_reported_before_anything_is_loaded(plan):
    with pytest.raises(MachineError, match=r"80 layers need 32.0 GiB of pinned host memory; 7.22 GiB are available") as error:
        check_layer_offloading(plan(place="cpu", weight_bytes=32 * GIB, pinned_bytes=32 * GIB))
    assert "layer_offloading=nvme" in error.value.fix
    with pytest.raises(MachineError, match="layer_offloading nvme: 80 layers need 9.00 GiB"):
        check_host_memory(plan(pinned_bytes=9 * GIB))
    check_layer_offloading(plan(place="cpu", weight_bytes=6 * GIB, pinned_bytes=6 * GIB))
    with pytest.raises(DiskFull, match="the file of 80 layers needs"):
        check_layer_offloading(plan(weight_bytes=2**50))
    check_layer_offloading(plan(weight_bytes=GIB))
