"""Forecast: where the bytes will be, found by running the real step on tensors without data."""

from finetune.forecast.forecast import PARTS, Forecast
from finetune.forecast.ledger import DryRun, dry_run
from finetune.forecast.whole_card import make_forecast

__all__ = ["PARTS", "DryRun", "Forecast", "dry_run", "make_forecast"]
