"""The Triton kernel for NF4 weights gives bitsandbytes' bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("nf4_in_interpreter.py")


@pytest.mark.standin
def test_the_kernel_gives_the_bits_of_bitsandbytes_for_all_shapes():
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    process = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split()[-1] == "40"
