"""The doctor on each machine: what it says of driver and cards."""

import json
import subprocess
import sys

import pytest

from finetune.doctor.machine import check_cards, check_driver
from finetune.units import GIB

pytestmark = pytest.mark.compiler


def test_a_driver_that_does_not_answer_is_reported_with_its_message(machine):
    machine("t4", "start = 9")
    assert check_driver().state in ("warn", "fail") and "Driver Not Loaded" in check_driver().what
    machine("t4", "start = 18")  # updated under the machine
    assert check_driver().state == "fail" and check_driver().fix == "Restart the machine."


def test_a_card_in_use_names_the_process_that_uses_it(machine):
    machine("t4", "used_mib = 9000", "compute = self 8999")
    (finding,) = check_cards()
    assert finding.state == "warn" and "python" in finding.what and "8.79 GiB" in finding.what
    assert finding.facts["free_bytes"] < 7 * GIB


def test_a_card_off_the_bus_is_a_failure_beside_the_one_that_works(machine):
    machine("lost-card")
    working, failed = check_cards()
    assert (working.state, failed.state) == ("ok", "fail")
    assert "GPU 0 can't be used (gpu is lost)" in failed.what and "dmesg" in failed.fix


def test_a_hidden_card_is_reported_as_hidden(machine):
    machine("two-3090", CUDA_VISIBLE_DEVICES="GPU-30911111")
    desktop, other = check_cards()
    assert (desktop.state, other.state) == ("skip", "ok") and "hidden by CUDA_VISIBLE_DEVICES" in desktop.what


@pytest.mark.slow
def test_a_process_of_its_own_finds_the_driver_by_the_librarys_name(machine):
    command = [sys.executable, "-m", "finetune", "doctor", "--json"]
    process = subprocess.run(command, env=machine("4090-desktop"), capture_output=True, text=True)
    findings = {finding["check"]: finding for finding in json.loads(process.stdout)["findings"]}
    assert "RTX 4090" in findings["card memory"]["what"] and findings["driver"]["facts"]["driver"] == "580.95.05"
