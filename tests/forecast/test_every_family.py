"""A small model of each family trains in 16 and in 4 bit; its memory is what the forecast says, its packed rows stay apart."""

import pytest
from families import BITS, FAMILIES, PHASES, table, trained

from finetune.model.catalogue import entries

#: Three of different kinds in the ordinary run: all together take minutes.
USUAL = {("gemma4", 4), ("qwen3_5_moe", 16), ("gpt_oss", 4)}
CASES = [
    pytest.param(family, bits, id=f"{family}-{bits}", marks=[] if (family, bits) in USUAL else pytest.mark.exhaustive)
    for family in FAMILIES
    for bits in BITS
]


def test_every_family_of_the_catalogue_is_here():
    assert {entry.config["model_type"] for entry in entries().values()} <= FAMILIES.keys()
    assert len(FAMILIES) >= 30


def test_the_table_has_every_family_and_no_error_over_half_a_percent():
    rows = table()
    assert [(row.family, row.bits) for row in rows] == [(family, bits) for family in sorted(FAMILIES) for bits in BITS]
    assert all(abs(row.worst_error) <= 0.005 and row.last_loss < row.first_loss for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "bits"), CASES)
def test_a_family_trains_and_every_phase_needs_what_its_dry_run_says(tmp_path, family, bits):
    expected, seen, losses = trained(family, bits, tmp_path)
    far = {phase: (expected[phase], seen[phase]) for phase in PHASES if abs(expected[phase] / seen[phase] - 1) > 0.005}
    assert not far
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2]
