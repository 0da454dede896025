"""Forgetting is measured on general questions."""

import json
import time

import pytest

from finetune.bundled import PROBE
from finetune.evaluate.results import Difference, Forgetting, read_forgetting
from finetune.evaluate.score import answerer_loader, measure_forgetting
from finetune.run.directory import RunDirectory


def test_the_general_questions_are_short_and_different():
    rows = [json.loads(line) for line in PROBE.read_text().splitlines()]
    assert len(rows) == 60 == len({row["prompt"] for row in rows})
    assert all(row["completion"].strip() and len(row["prompt"]) + len(row["completion"]) < 160 for row in rows)


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.5, 0.2, 0.8, None), "lost in part"),
        ((-0.5, -0.8, -0.2, None), "nothing lost"),
        ((0.1, -0.2, 0.4, 9), "too few rows"),
    ],
)
def test_a_significant_rise_of_the_loss_is_distinguished_from_an_uncertain_one(interval, verdict):
    forgetting = Forgetting(60, 2.0, 2.5, Difference(*interval))
    assert verdict in forgetting.summary() and "loss 2.0000 before, 2.5000 now" in forgetting.summary()


@pytest.mark.slow
def test_losses_before_and_now_are_measured_and_stored(home, kept_run):
    run, started = RunDirectory(kept_run(home)), time.process_time()
    general = measure_forgetting(run, answerer_loader(run))
    assert time.process_time() - started < 10
    assert general.rows == 60 and general.before != general.now and read_forgetting(run) == general
