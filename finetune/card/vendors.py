"""The vendors whose GPUs can be used, and the one whose GPU this machine has."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from finetune.card.vendor import DriverError, Vendor

if TYPE_CHECKING:
    from finetune.card.card import Card


@functools.cache
def vendors() -> tuple[Vendor, ...]:
    """The table: another vendor is a module beside nvidia.py and a row here."""
    from finetune.card.nvidia import Nvidia

    return (Nvidia(),)


def current_vendor() -> Vendor:
    """The first vendor whose driver answers; the first row where none does, or where there is no other."""
    rows = vendors()
    return next((row for row in rows if len(rows) == 1 or _answers(row)), rows[0])


def vendor_of(card: Card | None = None) -> Vendor:
    """The vendor of a card, which need not be in this machine; without one, or without its vendor's name, this machine's."""
    name = card.vendor if card else ""
    return next((row for row in vendors() if row.name == name), None) or current_vendor()


def _answers(row: Vendor) -> bool:
    try:
        row.driver_versions()
    except DriverError:
        return False
    return True
