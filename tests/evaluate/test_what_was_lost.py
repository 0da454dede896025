"""What training took from a model is measured: on general questions, and on the rows of the run that it went on from."""

import json
import shutil
import time

import pytest

from finetune.bundled import PROBE
from finetune.evaluate.lost import Lost, read_lost, what_was_lost
from finetune.evaluate.paired import Difference
from finetune.evaluate.score import compare
from finetune.run import origin
from finetune.run.directory import RunDirectory


def test_the_general_questions_are_short_and_different():
    rows = [json.loads(line) for line in PROBE.read_text().splitlines()]
    assert len(rows) == 60 == len({row["prompt"] for row in rows})
    assert all(row["completion"].strip() and len(row["prompt"]) + len(row["completion"]) < 160 for row in rows)


@pytest.mark.parametrize(
    ("gap", "said"),
    [((0.5, 0.2, 0.8, None), "lost in part"), ((-0.5, -0.8, -0.2, None), "nothing lost"), ((0.1, -0.2, 0.4, 90), "can't tell")],
)
def test_a_loss_that_rose_is_told_from_one_that_may_not_have(gap, said):
    lost = Lost("general questions", 60, 2.0, 2.5, Difference(*gap))
    assert said in lost.in_words() and "loss 2.0000 before, 2.5000 now" in lost.in_words()
    assert read_lost({**vars(lost), "difference": vars(lost.difference)}) == lost


@pytest.fixture
def run(home, kept_run):
    """A run that went on from the kept one's adapter, and is still that."""
    first = kept_run(home)
    shutil.copytree(first, home / "second")
    made = RunDirectory(home / "second")
    origin.keep(made, first / "adapter")
    return made


@pytest.mark.slow
def test_losses_before_and_now_are_those_of_the_same_rows(run):
    began = time.process_time()
    general, before = what_was_lost(run)
    assert time.process_time() - began < 10
    assert (general.rows_of, general.rows) == ("general questions", 60) and general.before != general.now
    assert before.rows_of == "held-out rows of finished"
    assert before.before == pytest.approx(before.now, rel=1e-6) == pytest.approx(compare(run).tuned.loss, rel=1e-6)
    made = compare(run, forgetting=True)
    assert made.base.answers == made.tuned.answers and made.forgetting and made.rows == 6
    assert json.loads((run.path / "evaluations" / "lost.json").read_text())[0]["rows"] == 60
