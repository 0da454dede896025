"""What torch reserves at most: the replay where all rows have one length, else never less than the interval without it."""

import pytest

from finetune.card import find_card
from finetune.forecast import whole_card
from finetune.forecast.reserved import Replay

GIB = 2**30


@pytest.mark.parametrize(
    ("expandable", "even", "most_gib"), [(False, True, 20.6), (False, False, 22.8), (True, True, 21.0), (True, False, 21.0)]
)
def test_the_replay_lowers_the_most_only_for_even_rows_without_expandable_segments(monkeypatch, expandable, even, most_gib):
    monkeypatch.setattr(whole_card, "expandable_segments", lambda: expandable)
    held = Replay(reserved_bytes=round(20.6 * GIB), allocated_bytes=20 * GIB, retries=0)
    _, likely, most = whole_card._reserved(20 * GIB, find_card("rtx-4090"), held, even=even)
    assert likely == held.reserved_bytes
    assert most == pytest.approx(most_gib * GIB * (1 + whole_card.DRY_RUN_ERROR))
