"""Driver, cards, memory, disk, port and spill: break what a check looks at, and it says so."""

import os
import socket
from pathlib import Path

import pytest

from finetune.doctor.machine import check_disk, check_driver, check_memory, check_port, check_spill


def pci_device(folder, vendor, kind):
    (folder / "0000:01:00.0").mkdir(parents=True)
    (folder / "0000:01:00.0" / "vendor").write_text(vendor + "\n")
    (folder / "0000:01:00.0" / "class").write_text(kind + "\n")
    return folder


def test_no_card_says_what_can_be_done_without_one(tmp_path):
    finding = check_driver(tmp_path)
    assert finding.state == "warn" and "--gpu rtx-4090" in finding.fix and "tiny-cpu" in finding.fix


def test_a_card_without_a_driver_is_a_failure(tmp_path):
    finding = check_driver(pci_device(tmp_path, "0x10de", "0x030000"))
    assert finding.state == "fail" and "Install NVIDIA's driver" in finding.fix


@pytest.mark.parametrize(("vendor", "reason"), [("0x1002", "AMD"), ("0x8086", "Intel")])
def test_a_card_of_another_maker_is_reported_with_what_is_in_the_way(tmp_path, vendor, reason):
    finding = check_driver(pci_device(tmp_path, vendor, "0x030000"))
    assert finding.state == "warn" and reason in finding.what and "--gpu rtx-3060" in finding.fix


def test_a_mac_gets_advice_on_what_trains_there(tmp_path):
    finding = check_driver(tmp_path, "Darwin")
    assert "Apple's chips have no CUDA" in finding.what and "MLX" in finding.fix


@pytest.mark.parametrize(("recommended", "minimum", "state"), [(0, 0, "ok"), (2**60, 0, "warn"), (2**60, 2**60, "fail")])
def test_host_memory_against_what_is_needed(recommended, minimum, state):
    finding = check_memory(recommended, minimum)
    assert finding.state == state and bool(finding.fix) == (state != "ok")
    assert 0 < finding.facts["free_bytes"] <= finding.facts["total_bytes"]


@pytest.mark.parametrize(("recommended", "minimum", "state"), [(0, 0, "ok"), (2**60, 0, "warn"), (2**60, 2**60, "fail")])
def test_disk_against_what_is_needed(tmp_path, recommended, minimum, state):
    (finding,) = check_disk({"runs": tmp_path / "not" / "yet"}, recommended, minimum)
    assert finding.state == state and finding.facts["path"] == str(tmp_path)


def test_a_place_that_cannot_be_written_is_a_failure():
    (finding,) = check_disk({"runs": Path("/proc")}, 0, 0)
    assert finding.state == "fail" and "can't be written" in finding.what


def test_a_port_in_use_is_found_and_another_one_proposed():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = check_port(port)
        assert finding.state == "warn" and f"--port {port + 1}" in finding.fix
    assert check_port(port).state == "ok"


@pytest.mark.parametrize(
    ("system", "release", "state"),
    [
        ("Linux", "6.8.0-generic", "ok"),
        ("Linux", "5.15.167.4-microsoft-standard-WSL2", "warn"),
        ("Windows", "11", "warn"),
    ],
)
def test_on_systems_that_fall_back_to_system_memory_the_setting_is_named(system, release, state):
    finding = check_spill(system, release)
    assert finding.state == state and ("Sysmem Fallback" in finding.fix) == (state == "warn")


def test_the_home_directory_is_not_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (finding,) = check_disk({"runs": tmp_path}, 0, 0)
    assert str(tmp_path) not in str(finding.as_json()) and "~" in finding.as_json()["what"]
    assert os.environ["HOME"] == str(tmp_path)
