"""Before a run with offloaded layers starts: host memory, the drive's room and its speed."""

import dataclasses
import resource

import psutil
import pytest

from finetune.card import find_card
from finetune.errors import DiskFull, MachineError
from finetune.memory.forecast import Forecast
from finetune.planner.plan import LayerCopies, Plan, Verdict
from finetune.recipe import parse_recipe
from finetune.run.offloading_checks import check_host_memory, check_layer_offloading, measure_read_rate
from finetune.settings import resolve_plain
from finetune.units import GIB, MIB

COPIES = LayerCopies("nvme", 80, 80, GIB, GIB // 8, 2**40, 3e9, 40.0, 180.0, 80.0, 180.0, 240.0)


@pytest.fixture
def plan(monkeypatch):
    """A plan on a card of this machine, which has 8 GiB of host memory free."""
    memory = psutil.virtual_memory()._replace(total=16 * GIB, available=8 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr("finetune.card.host._cgroup", lambda *_: None)

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
    enough = plan(place="cpu", weight_bytes=6 * GIB, pinned_bytes=6 * GIB)
    assert check_layer_offloading(enough) is enough


def test_a_drive_without_room_for_the_file_is_reported(plan, tmp_path):
    with pytest.raises(DiskFull, match="the file of 80 layers needs"):
        check_layer_offloading(plan(weight_bytes=2**50), folder=tmp_path)


def test_the_drives_speed_is_measured_and_a_step_priced_with_it(plan, tmp_path):
    planned = plan(moved_bytes_per_step=GIB)
    seen = check_layer_offloading(planned, folder=tmp_path)
    assert seen.layer_copies.copied_bytes_per_s <= planned.card.pcie_bytes_s
    assert seen.layer_copies.forward_copying_s == pytest.approx(GIB / 2 / seen.layer_copies.copied_bytes_per_s)
    assert "GB/s; the run moves 1.00 GiB a step behind 2 min 00 s of arithmetic" in seen.forecast.notes[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_drive_far_too_slow_is_refused_unless_forced(plan, tmp_path):
    much = plan(moved_bytes_per_step=2**55)
    with pytest.raises(MachineError, match="layer_offloading nvme: the drive of .* reads .* GB/s") as error:
        check_layer_offloading(much, folder=tmp_path)
    assert "--force" in error.value.fix and "FINETUNE_CACHE" in error.value.fix
    assert check_layer_offloading(much, force=True, folder=tmp_path).layer_copies.waiting_s > 1000


def test_a_full_disk_and_a_folder_that_can_not_be_written_are_reported(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DiskFull, match="can't be written"):
        measure_read_rate(tmp_path / "file")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))  # as a full disk: a file can't grow
    try:
        with pytest.raises(DiskFull, match="File too large"):
            measure_read_rate(tmp_path, sample_bytes=64 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
