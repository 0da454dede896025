"""The arithmetic forecast for tests of the planner."""

import pytest
from arithmetic_forecast import ArithmeticForecaster


@pytest.fixture
def forecast_by(monkeypatch):
    """forecast_by(forecaster): the planner asks it instead of the dry run."""
    return lambda forecaster: monkeypatch.setattr("finetune.planner.planner.make_forecast", forecaster)


@pytest.fixture
def arithmetic(forecast_by):
    """The planner forecasts by arithmetic; `.calls` counts how often."""
    forecast_by(forecaster := ArithmeticForecaster())
    return forecaster
