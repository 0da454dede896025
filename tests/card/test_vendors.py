"""A card asks its own vendor, which need not be this machine's."""

import pytest

from finetune.card import allocator, vendors
from finetune.card.card import Card
from finetune.card.nvidia import Nvidia


class Other(Nvidia):
    """A second row of the table, whose answers differ from NVIDIA's."""

    name = "Other"

    def driver_versions(self):
        raise AssertionError("no driver is asked about a card that is named")

    def supports_bf16(self, capability):
        return capability is None

    def supports_expandable_segments(self, *, windows_driver):
        return False


@pytest.fixture(autouse=True)
def two_vendors(monkeypatch):
    monkeypatch.setattr(vendors, "vendors", lambda: (Nvidia(), Other()))


def test_each_card_has_the_answers_of_its_vendor():
    nvidia, other = Card("a", 2, 1, (8, 0), vendor="NVIDIA"), Card("b", 2, 1, None, vendor="Other")
    assert nvidia.supports_bf16 and other.supports_bf16 and not Card("c", 2, 1, None, vendor="NVIDIA").supports_bf16
    assert allocator.expandable_segments(nvidia, "linux") and not allocator.expandable_segments(other, "linux")
