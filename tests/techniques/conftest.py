"""One tiny base model for all tests of the techniques."""

import pytest
from tiny_training import save_tiny_base


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> str:
    return save_tiny_base(tmp_path_factory.mktemp("tiny-base"))
