"""Forecast: where the bytes will be, found by running the real step on tensors without data."""

from finetune.forecast.dry_run import DryRun, dry_run
from finetune.forecast.forecast import PARTS, Forecast
from finetune.forecast.whole_card import expandable_segments, make_forecast

__all__ = ["PARTS", "DryRun", "Forecast", "dry_run", "expandable_segments", "make_forecast"]
