"""benchmarks/card_peers.py finds the longest row; with peers.py, a run that fails or learns something else has no figures."""

import pytest
import torch
from blocks.measured import card_peers as page_of_peers

from benchmarks.card_peers import COLUMNS, LLAMA, Cell, all_cells, line_of, name_of
from benchmarks.peer_watch import GRAIN_SHARE, GRAIN_TOKENS, lengthened, longest_row
from benchmarks.peers import compared, row_of
from benchmarks.tables import REFERENCE, read_table, write_table

GIB = 2**30
CELL = Cell("trl", LLAMA, "rtx-4090", "defaults", 2, 2048)
FIGURES = {"version": "1", "torch": "2", "allocated_bytes": 7 * GIB, "reserved_bytes": 8 * GIB, "host_bytes": 0}


@pytest.mark.parametrize("weights", [0.5, 4, 6])
@pytest.mark.parametrize("bytes_of_token", [90_000, 400_000, 3_000_000])
@pytest.mark.parametrize("bytes_of_pair", [0, 2])
def test_the_longest_row_is_found_to_the_grain_in_few_steps(weights, bytes_of_token, bytes_of_pair):
    tried = []

    def fitting(tokens):
        return weights * GIB + bytes_of_token * tokens + bytes_of_pair * tokens**2 <= 8 * GIB

    fits = longest_row(lambda tokens: tried.append(tokens) or fitting(tokens), 1024, 131_072)
    assert fitting(fits) and all(tokens > fits for tokens in tried if not fitting(tokens))
    assert not fitting(fits + max(GRAIN_TOKENS, round(GRAIN_SHARE * fits)) + GRAIN_TOKENS) or fits == 131_072
    assert len(tried) == len(set(tried)) <= 20


def test_a_batch_is_made_longer_in_all_that_has_a_value_for_each_token():
    row = torch.arange(1, 5)[None]
    batch = {"input_ids": row, "position_ids": row - 1, "packed_seq_lengths": torch.tensor([4]), "other": "text"}
    longer = lengthened(batch, 10)
    assert longer["input_ids"].tolist() == [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2]]
    assert longer["position_ids"].tolist() == [list(range(10))]
    assert longer["packed_seq_lengths"].tolist() == [10] and longer["other"] == "text"


@pytest.mark.parametrize(
    ("figures", "failed"),
    [
        ({**FIGURES, "batch_tokens": 4094}, ""),
        ({**FIGURES, "batch_tokens": 2048}, "trained on 2048 tokens in place of 4096"),
        ({**FIGURES, "batch_tokens": 4096, "out_of_memory": True}, "out of memory"),
        ({"failed": "ImportError: flash_attn"}, "ImportError: flash_attn"),
    ],
)
def test_a_failed_run_has_a_reason_and_no_bytes(figures, failed):
    line = line_of(CELL, figures)
    assert line["failed"] == failed and (line["allocated_bytes"] == "") == bool(failed)


def test_the_page_has_steps_and_longest_rows_apart_and_each_committed_line_is_of_a_cell(tmp_path):
    longest = Cell("trl", LLAMA, "rtx-4060", "defaults", 1, None)
    lines = [line_of(CELL, {**FIGURES, "batch_tokens": 4096}), line_of(longest, {**FIGURES, "longest_tokens": 2816})]
    write_table(tmp_path / "peers.csv", lines, COLUMNS)
    steps, lengths = page_of_peers(tmp_path / "peers.csv").strip().split("\n\n")
    assert "2 x 2048" in steps and "2,816" not in steps and "2,816" in lengths
    assert {name_of(line) for line in read_table(REFERENCE / "card_peers.csv")} <= {
        name_of(cell.columns) for cell in all_cells()
    }


OWN = {
    "version": "1", "device": "cpu", "step_s": [9.0, 1.0, 1.0, 1.0, 1.0], "tokens": [[90, 100, 120]] * 5,
    "losses": [4.0, 3.0, 2.5, 2.2, 2.0], "first_step_s": 12.0, "peak_rss_bytes": 2**30,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"losses": [4.0, 3.01, 2.49, 2.21, 2.0]}, ""),
        ({"losses": [4.1, 3.0, 2.5, 2.2, 2.0]}, "first loss 4.1000, not 4.0000"),
        ({"losses": [4.0, 3.3, 2.8, 2.5, 2.3]}, "losses differ by 10"),
        ({"losses": [4.0, 3.0]}, "2 steps in place of 5"),
        ({"tokens": [[45, 100, 120]] * 5}, "trained on 225 tokens, not 450"),
    ],
)
def test_a_run_is_compared_with_this_projects_losses_and_tokens(changes, why):
    assert compared({**OWN, **changes}, OWN)[1].startswith(why) and bool(compared({**OWN, **changes}, OWN)[1]) == bool(why)


def test_speed_is_of_the_steps_after_the_warm_up_of_the_same_round_and_a_tool_that_can_not_run_says_why():
    twice = {**OWN, "step_s": [90.0, 9.0, 9.0, 0.5, 0.5]}
    row = row_of("trl", [twice, twice], [OWN, OWN], 40)
    assert (row["supervised_tokens_per_s"], row["real_tokens_per_s"], row["padded_tokens_per_s"]) == (180, 200, 240)
    assert row["ratio"] == 2.0 and not row["failed"] and row["peak_rss_mib"] == 1024
    assert row_of("axolotl", [], [OWN], 40)["failed"] == "not run: no environment was given"
    assert row_of("axolotl", [{"failed": "ImportError: flash_attn"}], [OWN], 40)["failed"] == "ImportError: flash_attn"
