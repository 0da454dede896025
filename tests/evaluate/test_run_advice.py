"""What runs that differ in one setting say about it."""

import json
import shutil
from dataclasses import asdict

import pytest

from finetune.cli.runs import change_runs
from finetune.evaluate.results import Comparison, Score
from finetune.evaluate.run_advice import advise
from finetune.files import write_json
from finetune.run.directory import RunDirectory


@pytest.fixture
def runs(home, kept_run):
    """runs({name: (settings, loss, scores)}) -> runs on the same rows, with these settings, losses and scores of rows."""
    first = kept_run(home)

    def make(values):
        created = []
        for name, (settings, loss, scores) in values.items():
            path = home / "runs" / name
            shutil.copytree(first, path)
            facts = {
                "data": "rows",
                "base": "weights",
                "model_name_or_path": "tiny",
                "lora_r": 8,
                "learning_rate": 1e-4,
                "seed": 1,
            }
            (path / "adapter" / "MANIFEST.json").write_text(json.dumps({"facts": facts | settings, "eval_loss": loss}))
            if scores is not None:
                write_evaluation(path, scores)
            created.append(RunDirectory(path))
        return created

    return make


def write_evaluation(path, scores):
    rows = len(scores)
    score = Score(sum(scores) / rows, 1.0, ["a"] * rows, row_losses=[1.0] * rows, row_tokens=[1] * rows, scores=scores)
    comparison = Comparison(rows, score, score, ["q"] * rows, ["a"] * rows, 1.0, None, None, "exact", None)
    (path / "evaluations").mkdir(exist_ok=True)
    write_json(path / "evaluations" / "scores-exact.json", asdict(comparison), checksum=True)


def effects_of(advice):
    return {(effect.setting, effect.values, effect.score): effect for effect in advice.effects}


def test_a_setting_that_changed_alone_is_compared_row_by_row(runs):
    (advice,) = advise(runs({
        "low": ({"learning_rate": 1e-5}, 0.9, [0.0] * 18 + [1.0] * 2),
        "high": ({"learning_rate": 1e-4}, 0.5, [1.0] * 18 + [0.0] * 2),
    }))  # fmt: skip
    assert advice.runs == ["high", "low"] and advice.losses == [0.5, 0.9] and advice.never_alone == []
    effect = effects_of(advice)["learning_rate", (1e-5, 1e-4), "exact"]
    assert effect.runs == ("low", "high") and effect.change == pytest.approx(0.8)
    assert effect.difference.is_significant and not advice.is_noise(effect)


def test_what_another_seed_changes_as_much_is_noise(runs):
    (advice,) = advise(runs({
        "one": ({}, 0.50, None), "other": ({"seed": 2}, 0.54, None), "wide": ({"lora_r": 64}, 0.47, None),
        "fast": ({"learning_rate": 1e-3}, 0.30, None),
    }))  # fmt: skip
    by_key = effects_of(advice)
    assert advice.noise == pytest.approx(0.04)
    assert advice.is_noise(by_key["lora_r", (8, 64), "held-out loss"])
    assert not advice.is_noise(by_key["learning_rate", (1e-4, 1e-3), "held-out loss"])


def test_settings_that_changed_together_are_named_and_not_judged(runs):
    (advice,) = advise(runs({"one": ({}, 0.5, None), "other": ({"lora_r": 64, "learning_rate": 1e-3}, 0.4, None)}))
    assert advice.effects == [] and advice.never_alone == ["learning_rate", "lora_r"]


def test_losses_that_are_different_quantities_are_not_compared(runs):
    (advice,) = advise(runs({"one": ({"beta": 0.1}, 0.5, None), "other": ({"beta": 0.3}, 0.2, None)}))
    assert advice.effects == [] and advice.losses == [None, None]


def test_other_rows_other_bases_and_damaged_results_are_left_out(runs, home):
    tried = runs({
        "one": ({}, 0.5, None), "rows": ({"data": "others"}, 0.4, None), "base": ({"base": "others"}, 0.3, None),
        "none": ({}, None, None), "damaged": ({}, 0.1, None), "odd": ({}, "NaN", None),
    })  # fmt: skip
    (home / "runs" / "damaged" / "adapter" / "MANIFEST.json").write_text("{")
    (advice,) = advise(tried)
    assert set(advice.runs) == {"one", "none", "odd"} and advice.effects == []


def test_the_command_prints_the_settings_that_moved_the_result(runs, capsys):
    runs({"low": ({"learning_rate": 1e-5}, 0.9, [0.0] * 20), "high": ({}, 0.5, [1.0] * 20)})
    change_runs("advice", [], as_json=False)
    printed = capsys.readouterr().out
    assert "learning_rate" in printed and "moves it" in printed and "runs/high/recipe.yaml" in printed
    change_runs("advice", ["runs/low", "runs/high"], as_json=True)
    assert json.loads(capsys.readouterr().out)[0]["effects"][0]["setting"] == "learning_rate"
