"""Forgetting is measured on general questions, and on the rows of the run that was continued."""

import json
import shutil
import time

import pytest

from finetune.bundled import PROBE
from finetune.evaluate.paired import Difference
from finetune.evaluate.results import Forgetting
from finetune.evaluate.score import answerer_loader, compare, measure_forgetting
from finetune.run import base_adapter
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
    forgetting = Forgetting("general questions", 60, 2.0, 2.5, Difference(*interval))
    assert verdict in forgetting.summary() and "loss 2.0000 before, 2.5000 now" in forgetting.summary()


@pytest.fixture
def run(home, kept_run):
    """A run that continues the stored run's adapter, without further training."""
    first = kept_run(home)
    shutil.copytree(first, home / "second")
    second = RunDirectory(home / "second")
    base_adapter.copy_base_adapter(second, first / "adapter")
    return second


@pytest.mark.slow
def test_losses_before_and_now_are_those_of_the_same_rows(run):
    started = time.process_time()
    general, before = measure_forgetting(run, answerer_loader(run))
    assert time.process_time() - started < 10
    assert (general.rows_of, general.rows) == ("general questions", 60) and general.before != general.now
    assert before.rows_of == "held-out rows of finished"
    assert before.before == pytest.approx(before.now, rel=1e-6) == pytest.approx(compare(run).tuned.loss, rel=1e-6)
    comparison = compare(run, forgetting=True)
    assert comparison.base.answers == comparison.tuned.answers and comparison.forgetting and comparison.rows == 6
    assert json.loads((run.path / "evaluations" / "lost.json").read_text())["groups"][0]["rows"] == 60
