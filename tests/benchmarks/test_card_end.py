"""The ends of a forecast and smaller GPUs: which cases there are, how they must end, and what the page says of them."""

import json
from types import SimpleNamespace

import pytest
from blocks.measured import stand_in_end

from benchmarks.card_end import COLUMNS, MIB, all_cases, budget_at, is_right
from benchmarks.tables import write_table


def line_of(case, outcome, changes="", base_format="NF4"):
    return {"case": case, "base_format": base_format, "outcome": outcome, "changes": changes}


def test_each_format_has_budgets_around_each_end_and_smaller_gpus():
    cases = all_cases(2)
    assert len(cases) == 57 and "NF4 | upper end -4 MiB" in cases and "int8 | smaller by 50%" in cases
    forecast = SimpleNamespace(peak_low_bytes=1000 * MIB, peak_bytes=1100 * MIB, peak_high_bytes=1200 * MIB)
    assert budget_at(forecast, "lower end", -2 * MIB) == 998 * MIB and budget_at(forecast, "likely peak", 0) == 1100 * MIB


@pytest.mark.parametrize(
    ("case", "outcome", "right"),
    [
        ("upper end -4 MiB", "finished", True),
        ("upper end -4 MiB", "out of memory", False),
        ("lower end +4 MiB", "out of memory", True),
        ("lower end +4 MiB", "finished", False),
        ("likely peak +0 MiB", "finished", True),
        ("likely peak +0 MiB", "out of memory", False),
        ("smaller by 20%", "finished", True),
        ("smaller by 20%", "exit 5", False),
    ],
)
def test_the_lower_end_is_out_of_memory_the_others_and_smaller_gpus_finish(case, outcome, right):
    assert is_right(line_of(case, outcome)) == right


def test_the_page_counts_outcomes_by_end_and_names_what_a_retry_changed(tmp_path):
    changes = json.dumps([{"per_device_train_batch_size": 4}, {"offload_embeddings": True}])
    lines = [
        line_of("upper end +0 MiB", "finished"), line_of("upper end +2 MiB", "finished"),
        line_of("lower end +0 MiB", "out of memory"), line_of("lower end +2 MiB", "finished"),
        line_of("smaller by 5%", "finished", changes), line_of("smaller by 1%", "finished", "[]"),
    ]  # fmt: skip
    write_table(tmp_path / "end.csv", lines, COLUMNS)
    text = stand_in_end(tmp_path / "end.csv")
    assert "| upper end | 2 finished |" in text and "| lower end | 1 out of memory, 1 finished |" in text
    assert "| smaller by 5% | finished: `per_device_train_batch_size=4`, `offload_embeddings=True` |" in text
    assert "| smaller by 1% | finished: no retry |" in text
