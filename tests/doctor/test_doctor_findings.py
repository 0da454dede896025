"""The report as a whole: every line is there in time, whatever one check does, and nothing secret is in it."""

import json
import os
import subprocess
import sys
import threading

import pytest

from finetune.doctor import Finding, run_check, worst


def test_a_check_that_hangs_is_a_line_too():
    released = threading.Event()
    (finding,) = run_check("hangs", lambda: released.wait(1000), 0.2)
    released.set()
    assert (finding.check, finding.state, finding.what) == ("hangs", "warn", "no answer within 0.2 s")


def test_a_check_that_breaks_is_a_line_too():
    (finding,) = run_check("bad", lambda: 1 / 0, 5)
    assert finding.state == "warn" and "ZeroDivisionError" in finding.what


def test_the_worst_state_counts():
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
