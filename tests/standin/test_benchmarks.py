"""A few cases of the benchmarks: forecasts beside torch's own allocator, retries, and calls of a compiled step."""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.tables import read_table

pytestmark = [pytest.mark.standin, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
#: Largest differences: a share, or bytes where that is more; a page of an expandable segment has 20 MiB.
ALLOCATED, RESERVED = (0.001, 2.5 * MIB), (0.01, 40 * MIB)
#: Share of allocated bytes where delta nets are recomputed, in a run that tunes fla's kernels first.
TUNED = 0.005
#: Share by which a mixture's run of three steps may reserve less than the replay, which has more steps of rows that differ.
FEWER_STEPS = 0.05
#: Of two layers of an 8B in NF4, with 2 % for another Python; each layer more has 1,814, and 2,883 recomputed.
MOST_CALLS = {"compiled, nothing recomputed": 5_367, "compiled, recomputed": 7_511}
#: Texts of a cell's name: each format, kind of rows and of segments, recomputation and mixture.
CELLS = [
    ("6 layers", "16 bit", "every layer"), ("6 layers", "16 bit", "pairs"), ("6 layers", "NF4", "every 2nd layer"),
    ("6 layers", "NF4", "packed"), ("6 layers", "NF4", "segments"), ("6 layers", "t4"), ("6 layers", "int8", "segments"),
    ("3 layers", "A3B", "adapters on"), ("3 layers", "gpt-oss", "nothing"),
    ("4 layers", "every layer"), ("4 layers", "NF4")
]  # fmt: skip
MORE_CELLS = [("6 layers", "16 bit", "segments"), ("6 layers", "NF4", "8-bit Adam"), ("4 layers", "16 bit", "nothing")]


def difference(line, kind):
    """(bytes beyond the forecast, the forecast's bytes)."""
    forecast, measured = (int(line[f"{who}_{kind}_bytes"] or 0) for who in ("forecast", "measured"))
    return abs(measured - forecast) if forecast else 0, forecast


@pytest.fixture
def lines_of(tmp_path, warm_python):
    """lines_of(benchmark, *arguments) -> the lines of its table."""

    def lines(benchmark, *arguments):
        output = tmp_path / "lines.csv"
        command = [warm_python, "-m", f"benchmarks.{benchmark}", *arguments, "--output", str(output)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path.parent / "triton")}
        result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return read_table(output)

    return lines


@pytest.mark.parametrize("cells", [*CELLS, *(pytest.param(more, marks=pytest.mark.exhaustive) for more in MORE_CELLS)])
def test_a_run_takes_what_was_forecast(cells, lines_of):
    """Six layers; mixtures of three, experts in NF4; three delta nets and an attention, also while fla's kernels are tuned."""
    lines = lines_of("card_matrix", "--only", *cells)
    assert {line["phase"] for line in lines} == {"load", "train", "eval", "save"}
    for line in lines:
        if line["phase"] == "eval" and (line["technique"] == "packed" or line["segments"] != "expandable"):
            continue  # packed held-out rows are forecast as full; where segments can't expand blocks are larger than needed
        below = int(line["measured_reserved_bytes"]) < int(line["forecast_reserved_bytes"] or 0)
        reserved = (FEWER_STEPS, RESERVED[1]) if below and "3 layers" in cells else RESERVED
        allocated = (TUNED, ALLOCATED[1]) if cells == ("4 layers", "every layer") else ALLOCATED
        for kind, (share, size) in (("allocated", allocated), ("reserved", reserved)):
            bytes_, forecast = difference(line, kind)
            assert bytes_ <= max(share * forecast, size), (kind, line)


def test_a_retry_takes_the_first_smaller_plan_that_is_forecast_to_fit(lines_of):
    (line,) = lines_of("card_end", "--only", "NF4 | smaller by 50%")
    assert line["outcome"] == "finished"
    assert line["changes"].count("{") == 2  # one attempt that was out of memory, one retry made smaller by the forecast


def test_calls_of_a_compiled_step_do_not_rise_there_is_one_graph_and_the_forecast_is_exact(lines_of):
    """Calls of Python are exact where no kernel computes."""
    rows = {row["program"]: row for row in lines_of("host_time", "--layers", "2", "--only", "compiled")}
    assert rows.keys() == MOST_CALLS.keys()
    for name, row in rows.items():
        assert int(row["calls"]) <= MOST_CALLS[name], row
        assert row["graphs"] == "1" and abs(float(row["error"])) < 1e-4, row
