"""No generated file is trained on with a meaningful column, field or split that is unread and unnamed."""

import random

import pytest

from hostile_data import column_cases, field_cases, problems, split_cases


@pytest.mark.parametrize("seed", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_generated_files_are_asked_about_or_read_rightly(tmp_path, seed):
    samples = [cases(seed) for cases in (column_cases, field_cases, split_cases)]
    samples = [cases[::2] if seed == 1 else random.Random(7).sample(cases, 60) for cases in samples]
    assert sum(map(len, samples)) > (1_000 if seed == 1 else 100)
    assert not problems(*samples, tmp_path)
