"""Versions, compiler, torch and its fit to the card, bitsandbytes, Triton: break each, and the report says so."""

import os
import stat
import sys
from pathlib import Path

import pytest

from finetune.card.nvidia import has_kernels
from finetune.doctor.machine import check_compiler, check_packages, check_stack
from finetune.doctor.probe import architecture_finding, cuda_finding

TORCH = {
    "version": "2.13.0",
    "cuda": "12.8",
    "hip": None,
    "architectures": ["sm_80", "sm_86"],
    "devices": [],
    "cuda_error": None,
}
CARD = {"name": "RTX 3090", "capability": [8, 6], "total_bytes": 24}


def test_the_installed_versions_are_inside_the_bounds_others_are_named_and_only_the_page_may_be_missing(monkeypatch):
    finding = check_packages()
    assert finding.state == "ok", finding
    assert f"python {sys.version.split()[0]}" in finding.what and "torch" in finding.what
    wanted = ["torch<2", "psutil>=6", "no-such-package>=1", "pytest>=99; extra == 'test'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: wanted)
    finding = check_packages()
    assert finding.state == "fail" and "torch " in finding.what and "no-such-package is missing" in finding.what
    assert finding.fix == "pip install 'torch<2' 'no-such-package>=1'"
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["psutil>=6", "no-such-package>=1; extra == 'ui'"])
    assert check_packages().state == "ok"
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["psutil>=6", "gradio<1; extra == 'ui'"])
    assert check_packages().fix == "pip install 'gradio<1'"


@pytest.mark.compiler
def test_the_compiler_here_compiles_and_missing_python_headers_are_named(monkeypatch, tmp_path):
    assert check_compiler().state == "ok"
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    finding = check_compiler()
    assert finding.state == "warn" and "Python.h" in finding.what


def test_no_compiler_is_named_and_one_that_fails_is_quoted(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = check_compiler()
    assert finding.state == "warn" and "no C compiler" in finding.what and "apt install gcc" in finding.fix
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cc1: error: no room in /tmp' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(broken))
    assert "no room in /tmp" in check_compiler().what
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    assert check_compiler().state == "warn"


@pytest.fixture
def broken(monkeypatch, tmp_path):
    """broken("bitsandbytes", code): the probe's process imports `code` in the package's place."""

    def put(package, code):
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "__init__.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    return put


def states(deadline_s=900.0):
    return {finding.check: finding for finding in check_stack(print, deadline_s)}


@pytest.mark.slow
def test_bitsandbytes_really_quantises_here():
    findings = states()
    assert findings["bitsandbytes"].state == "ok", findings
    assert "relative error" in findings["bitsandbytes"].what
    assert findings["cuda"].state in ("ok", "skip") and findings["triton"].state in ("ok", "skip")


def test_torch_that_can_not_be_imported_is_reported_without_guesses_and_one_that_hangs_after_the_deadline(broken):
    broken("torch", "raise ImportError('libcudart.so.12: cannot open shared object file')")
    findings = states()
    assert findings["cuda"].state == "fail" and "libcudart.so.12" in findings["cuda"].what
    assert list(findings) == ["cuda"]
    broken("torch", "import time; time.sleep(1000)")
    findings = states(deadline_s=1.0)
    assert findings["cuda"].state == "warn" and "no answer within 1 s" in findings["cuda"].what


@pytest.mark.slow
def test_a_library_that_crashes_is_reported_and_what_came_before_counts(broken):
    broken("bitsandbytes", "import os; os.abort()")
    findings = states()
    assert findings["cuda"].state in ("ok", "skip")
    assert findings["bitsandbytes"].state == "fail" and "SIGABRT" in findings["bitsandbytes"].what


@pytest.mark.slow
def test_a_quantisation_that_gives_other_numbers_is_reported(broken):
    broken("bitsandbytes", "import bnb_nn as nn, sys; sys.modules['bitsandbytes.nn'] = nn")
    code = (
        "import torch\nclass Linear4bit(torch.nn.Linear):\n"
        "    def __init__(self, a, b, **_): super().__init__(a, b, bias=False)\n"
        "    def forward(self, x): return super().forward(x) * 1.5\n"
    )
    Path(os.environ["PYTHONPATH"].split(os.pathsep)[0], "bnb_nn.py").write_text(code)
    finding = states()["bitsandbytes"]
    assert finding.state == "fail" and "off by 50%" in finding.what


@pytest.mark.parametrize(
    ("changes", "driver", "state", "reason"),
    [
        ({"devices": [CARD]}, ("570", (12, 8)), "ok", "RTX 3090"),
        ({}, None, "skip", "no driver"),
        ({"cuda": None}, None, "skip", "CPU-only build"),
        ({"cuda": None}, ("570", (12, 8)), "fail", "the GPU is not used"),
        ({"cuda": "13.0"}, ("570", (12, 8)), "fail", "supports CUDA up to 12.8"),
        ({"cuda": "12.9"}, ("570", (12, 8)), "fail", "sees no GPU"),  # a newer minor version would have run
        ({"cuda_error": "CUDA unknown error"}, ("570", (12, 8)), "fail", "CUDA unknown error"),
        ({"cuda": None, "hip": "6.4"}, None, "warn", "ROCm"),
    ],
)
def test_torch_and_driver(changes, driver, state, reason):
    finding = cuda_finding({**TORCH, **changes}, driver)
    assert finding.state == state and reason in finding.what
    assert bool(finding.fix) == (state == "fail")


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80", "sm_86"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((9, 0), ["sm_90a"], True),
        ((12, 0), ["sm_90a", "compute_90a"], False),
        ((12, 0), ["sm_75", "sm_120"], True),
        ((12, 1), ["sm_120f"], True),
        ((6, 1), ["sm_75", "sm_120", "compute_120"], False),
        ((8, 6), [], False),
    ],
)
def test_a_wheel_runs_on_the_cards_it_has_code_for(capability, architectures, runs):
    assert has_kernels(capability, architectures) is runs


def test_a_card_that_the_wheel_has_no_code_for_is_a_failure():
    finding = architecture_finding(TORCH, {**CARD, "name": "RTX 5090", "capability": [12, 0]})
    assert finding.state == "fail" and "sm_80 sm_86" in finding.what and "torch-backend" in finding.fix
    assert architecture_finding(TORCH, CARD).state == "ok"
