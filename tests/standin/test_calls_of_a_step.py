"""What a step of compiled layers asks of Python: calls, counted on the stand-in GPU, where they are exact."""

import csv
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.standin, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
#: Of two layers of an 8B in NF4, with 2 % for another Python; each layer more has 1,848, and 2,920 recomputed.
MOST_CALLS = {"compiled, nothing recomputed": 5_530, "compiled, recomputed": 7_720}


def test_calls_do_not_rise_there_is_one_graph_and_the_forecast_is_exact(tmp_path, warm_python):
    output = tmp_path / "host_time.csv"
    command = [warm_python, "-m", "benchmarks.host_time", "--layers", "2", "--only", "compiled", "--output", str(output)]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    with output.open(newline="", encoding="utf-8") as file:
        rows = {row["program"]: row for row in csv.DictReader(file)}
    assert rows.keys() == MOST_CALLS.keys()
    for name, row in rows.items():
        assert int(row["calls"]) <= MOST_CALLS[name], row
        assert row["graphs"] == "1" and abs(float(row["error"])) < 1e-4, row
