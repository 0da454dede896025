"""No generated file is trained on with a meaningful column, field or split that is unread and unnamed."""

import random

import pytest

from hostile_data import column_cases, field_cases, problems, split_cases


def test_a_sample_of_generated_files_is_asked_about_or_read_rightly(tmp_path):
    generator = random.Random(7)
    samples = [generator.sample(cases(7), 60) for cases in (column_cases, field_cases, split_cases)]
    assert not problems(*samples, tmp_path)


@pytest.mark.slow
def test_1000_generated_files_are_asked_about_or_read_rightly(tmp_path):
    samples = [cases(1)[::2] for cases in (column_cases, field_cases, split_cases)]
    assert sum(map(len, samples)) > 1_000
    assert not problems(*samples, tmp_path)
