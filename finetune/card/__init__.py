"""Facts of one GPU, measured or from the catalogue."""

from finetune.card.card import Card
from finetune.card.find import catalogue, find_card
from finetune.card.measured import measured_context, record_measurement

__all__ = ["Card", "catalogue", "find_card", "measured_context", "record_measurement"]
