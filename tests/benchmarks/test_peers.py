"""benchmarks/peers.py: a run that trains on something else, or learns something else, has failed however fast it was."""

import pytest

from benchmarks.peers import compared, row_of

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


def test_speed_is_of_the_steps_after_the_warm_up_and_of_runs_of_the_same_round():
    twice = {**OWN, "step_s": [90.0, 9.0, 9.0, 0.5, 0.5]}
    row = row_of("trl", [twice, twice], [OWN, OWN], 40)
    assert (row["supervised_tokens_per_s"], row["real_tokens_per_s"], row["padded_tokens_per_s"]) == (180, 200, 240)
    assert row["ratio"] == 2.0 and not row["failed"] and row["peak_rss_mib"] == 1024


def test_a_tool_that_can_not_be_run_has_a_row_that_says_why():
    assert row_of("axolotl", [], [OWN], 40)["failed"] == "not run: no environment was given"
    assert row_of("axolotl", [{"failed": "ImportError: flash_attn"}], [OWN], 40)["failed"] == "ImportError: flash_attn"
