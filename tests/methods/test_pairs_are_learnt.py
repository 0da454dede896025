"""A run on pairs puts held-out pairs in order, as its own evaluations and `finetune eval` say."""

import json

import pytest

from finetune.bundled import dataset_paths
from finetune.evaluate.score import compare
from finetune.evaluate.scorers import scorer
from finetune.events import Evaluation, Step, read_events
from finetune.recipe import load_recipe
from finetune.run.prepare import create_run, prepare
from finetune.run.state import read_state
from finetune.run.worker import Worker
from tests.methods.test_dpo_is_trls import method_with


@pytest.mark.parametrize(
    ("settings", "log_ratio", "tokens", "collapsed"),
    [
        ({"method": "dpo"}, -30.0, 20, True),
        ({"method": "dpo"}, -30.0, 40, False),  # less than a nat for each token
        ({"method": "dpo"}, -4.0, 1, False),  # of one word, where no answer is certain
        ({"method": "dpo", "loss_type": "apo_down"}, -30.0, 20, False),  # which is to make it less likely
        ({"method": "kto"}, -30.0, 20, True),
        ({"method": "kto"}, 3.0, 20, False),
    ],
)
def test_chosen_answers_collapse_where_they_are_far_less_likely_than_for_the_reference(settings, log_ratio, tokens, collapsed):
    method = method_with(**settings, beta=0.1)
    counts = {"chosen": 3, "chosen_tokens": 3 * tokens, "rewards/chosen": 3 * 0.1 * log_ratio}
    message = method.collapse(counts)
    assert message is None if not collapsed else "30 nats less likely than before training, 1.5 per token" in message


def trained(*overrides):
    """A run of the bundled model with these overrides, and its exit status."""
    run = create_run(prepare(load_recipe("tiny-cpu", ["sample_answers=0", *overrides])))
    return run, Worker(run).main()


@pytest.fixture
def trained_on(tmp_path):
    """trained_on(rows, *overrides) -> a run on these pairs, and its exit status."""

    def train(rows, *overrides):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return trained(f"dataset={path}", "method=dpo", "load_in_4bit=false", f"output_dir={tmp_path / 'run'}", *overrides)

    return train


@pytest.mark.slow
def test_a_run_that_makes_chosen_answers_unlikely_diverges_and_says_so(trained_on):
    answer = "Yes, order {} is late, and we are sorry for {}."  # alike, so that what lowers one lowers both
    rows = [
        {"instruction": f"Is {n} late?", "chosen": answer.format(n, "that"), "rejected": answer.format(n, "it")}
        for n in range(64)
    ]
    overrides = ["dataset.test_split_size=0", "beta=0.01", "max_steps=24", "learning_rate=1e-2", "eval_steps=0"]
    run, code = trained_on(rows, *overrides, "lr_scheduler_type=constant", "warmup_ratio=0")
    state = read_state(run)
    assert code == 6
    assert state.state == "diverged" and "chosen answers are" in state.message and "sft_weight=1" in state.message


@pytest.mark.slow
def test_held_out_pairs_are_put_in_order(trained_on, tmp_path):
    rows = [{"instruction": f"Is order {n} late?", "chosen": "Yes, it is.", "rejected": "No."} for n in range(48)]
    overrides = ["dataset.test_split_size=16", "max_steps=12", "learning_rate=2e-3", "effective_batch_size=4"]
    overrides += ["per_device_train_batch_size=4", "eval_steps=6", "per_device_eval_batch_size=16"]
    run, code = trained_on(rows, *overrides)
    assert code == 0
    every = list(read_events(run.events))
    steps, evaluations = ([event for event in every if isinstance(event, kind)] for kind in (Step, Evaluation))
    assert (steps[0].loss, steps[0].metrics["rewards/margins"]) == pytest.approx((0.6931, 0), abs=1e-3)
    assert evaluations[-1].metrics["rewards/accuracies"] >= 0.8
    assert evaluations[-1].eval_loss < 0.6

    result = compare(run, score=scorer("loss"))
    assert len(result.tuned.margins) == 16
    assert result.pair_margin_difference.low > 0
    gained = result.tuned.pair_margin - result.base.pair_margin
    assert 0.1 * gained == pytest.approx(evaluations[-1].metrics["rewards/margins"], rel=0.05)  # beta
    from_file = compare(run, score=scorer("loss"), data=str(tmp_path / "pairs.jsonl"))
    assert len(from_file.tuned.margins) == 48 and from_file.trained_rows == 32
    (tmp_path / "answers.jsonl").write_text(json.dumps({"instruction": "Is order 1 late?", "output": "Yes, it is."}) + "\n")
    assert compare(run, score=scorer("loss"), data=str(tmp_path / "answers.jsonl")).tuned.margins == []
    assert result.tuned.pairs_in_order == sum(margin > 0 for margin in result.tuned.margins) / 16


@pytest.mark.exhaustive  # the tests above are small
@pytest.mark.parametrize(("method", "steps"), [("dpo", 100), ("kto", 120)])
def test_bundled_pairs_are_put_in_order_and_the_fine_tunes_task_stays(tmp_path, shipped_run, method, steps):
    """KTO in fewer steps at a higher rate than in docs/preferences.md, which has what its own command reaches."""
    adapter = shipped_run[0] / json.loads(shipped_run[1].splitlines()[-1])["run"]
    settings = ["beta=0.5", "learning_rate=3e-4", f"max_steps={steps}", "eval_steps=0", f"output_dir={tmp_path / 'run'}"]
    run, code = trained(f"adapter_name_or_path={adapter}", "dataset=support-pairs", f"method={method}", *settings)
    assert code == 0
    pairs = compare(run, score=scorer("loss"), data="support-pairs")
    assert 0.4 <= pairs.base.pairs_in_order <= 0.65 and pairs.tuned.pairs_in_order >= 0.9
    task = compare(run, score=scorer("exact"), data=str(dataset_paths("support")["eval"]))
    before, after = (sum(score.exact) / len(score.exact) for score in (task.base, task.tuned))
    assert before >= 0.95 and after > before - 0.03
