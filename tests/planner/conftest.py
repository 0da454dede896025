"""The arithmetic forecast for tests of the planner."""

import pytest
from arithmetic_forecast import ArithmeticForecaster


@pytest.fixture(scope="session")
def new_forecaster() -> type:
    """The arithmetic forecast; `.calls` of one counts how often it was asked."""
    return ArithmeticForecaster
