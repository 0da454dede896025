"""Every line of the report is there in time, whatever one check does, and nothing secret; driver, memory, disk and spill."""

import json
import os
import subprocess
import sys
import threading

import pytest

from finetune.doctor import Finding, machine, run_check, worst
from finetune.doctor.machine import check_disk, check_driver, check_memory, check_spill


def test_a_check_that_hangs_or_breaks_is_a_line_too_and_the_worst_state_counts():
    released = threading.Event()
    (finding,) = run_check("hangs", lambda: released.wait(1000), 0.2)
    released.set()
    assert (finding.check, finding.state, finding.what) == ("hangs", "warn", "no answer within 0.2 s")
    (finding,) = run_check("bad", lambda: 1 / 0, 5)
    assert finding.state == "warn" and "ZeroDivisionError" in finding.what
    assert worst([]) == "ok"
    assert worst([Finding("a", "skip", ""), Finding("b", "warn", ""), Finding("c", "ok", "")]) == "warn"
    assert worst([Finding("a", "fail", ""), Finding("b", "warn", "")]) == "fail"


@pytest.mark.slow
def test_the_report_is_one_json_document_with_every_line_in_order_and_nothing_secret():
    secret = "hf_" + "t0psecret" * 4
    environment = {**os.environ, "HF_TOKEN": secret, "HF_ENDPOINT": "http://user:passw0rd@127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "finetune", "doctor", "tiny-cpu", "--json"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    values = json.loads(process.stdout)
    checks = [finding["check"] for finding in values["findings"]]
    assert checks[:2] == ["packages", "driver"] and checks[-1] == "data" and "model" in checks
    assert {"compiler", "host memory", "disk", "hub", "hub login", "spill"} <= set(checks)
    assert process.returncode == (1 if values["state"] == "fail" else 0)
    assert all(finding["fix"] for finding in values["findings"] if finding["state"] in ("warn", "fail"))

    assert secret not in process.stdout + process.stderr and "passw0rd" not in process.stdout + process.stderr


def test_a_bad_recipe_is_a_recipe_error():
    process = subprocess.run([sys.executable, "-m", "finetune", "doctor", "no-such"], capture_output=True, text=True)
    assert process.returncode == 2 and "there is no recipe" in process.stderr


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


def test_a_place_that_cannot_be_written_is_a_failure_and_the_home_directory_is_not_reported(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/proc")
    _, finding = check_disk()
    assert finding.state == "fail" and "can't be written" in finding.what
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    _, finding = check_disk()
    assert str(tmp_path) not in str(finding.as_json()) and "~" in finding.as_json()["what"]


@pytest.mark.parametrize(
    ("system", "release", "state"),
    [("Linux", "6.8.0-generic", "ok"), ("Linux", "5.15.167.4-microsoft-standard-WSL2", "warn"), ("Windows", "11", "warn")],
)
def test_on_systems_that_fall_back_to_system_memory_the_setting_is_named(system, release, state, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.release", lambda: release)
    finding = check_spill()
    assert finding.state == state and ("Sysmem Fallback" in finding.fix) == (state == "warn")
