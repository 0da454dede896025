"""Driver, cards, memory, disk and spill: break what a check looks at, and it says so."""

import pytest

from finetune.doctor import machine
from finetune.doctor.machine import check_disk, check_driver, check_memory, check_spill


def test_without_a_driver_the_fix_names_it_and_what_works_without_a_gpu():
    finding = check_driver()
    assert finding.state == "warn" and "no NVIDIA GPU" in finding.what
    assert all(fix in finding.fix for fix in ("Install the driver", "--gpu rtx-4090", "tiny-cpu"))


@pytest.mark.parametrize(("recommended", "minimum", "state"), [(0, 0, "ok"), (2**60, 0, "warn"), (2**60, 2**60, "fail")])
def test_host_memory_and_disk_against_what_is_needed(tmp_path, recommended, minimum, state, monkeypatch):
    for kind in ("MEMORY", "DISK"):
        monkeypatch.setattr(machine, f"RECOMMENDED_{kind}_BYTES", recommended)
        monkeypatch.setattr(machine, f"MINIMUM_{kind}_BYTES", minimum)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    memory, (_, disk) = check_memory(), check_disk()
    assert memory.state == disk.state == state and bool(memory.fix) == (state != "ok")
    assert "available" in memory.what and disk.what.endswith(f"free at {tmp_path}")


def test_a_place_that_cannot_be_written_is_a_failure(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/proc")
    _, finding = check_disk()
    assert finding.state == "fail" and "can't be written" in finding.what


@pytest.mark.parametrize(
    ("system", "release", "state"),
    [("Linux", "6.8.0-generic", "ok"), ("Linux", "5.15.167.4-microsoft-standard-WSL2", "warn"), ("Windows", "11", "warn")],
)
def test_on_systems_that_fall_back_to_system_memory_the_setting_is_named(system, release, state, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.release", lambda: release)
    finding = check_spill()
    assert finding.state == state and ("Sysmem Fallback" in finding.fix) == (state == "warn")


def test_the_home_directory_is_not_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    _, finding = check_disk()
    assert str(tmp_path) not in str(finding.as_json()) and "~" in finding.as_json()["what"]
