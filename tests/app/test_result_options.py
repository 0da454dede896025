"""What is chosen on the page becomes options of the command, which accepts them; nothing typed there becomes an option."""

import json
from types import SimpleNamespace

import pytest

from app.pages.result import _HELD_OUT, _View, evaluation
from app.views import options as page_options
from app.views.scores import scores
from finetune.cli.app import cli
from finetune.evaluate.scorers import SCORES


def parsed(options):
    """The options as the command reads them."""
    from typer.main import get_command

    command = get_command(cli).commands["eval"]
    return command.make_context("eval", ["latest", *options]).params


def test_every_score_but_a_function_can_be_chosen():
    assert set(page_options.SCORES.values()) == {"", *SCORES}


@pytest.mark.parametrize(
    ("chosen", "read"),
    [(("Chosen by the answers", "", 0, _HELD_OUT, 0, False), {"score": None, "data": None, "rows": None, "last": False}),
     (("Regular expression", "--json", 0, "-x.jsonl", 20.0, True),
      {"score": "regex", "pattern": "--json", "data": "-x.jsonl", "rows": 20, "last": True, "as_json": False}),
     (("Last number", "ignored", 0.01, _HELD_OUT, None, False), {"score": "numeric", "tolerance": 0.01, "pattern": None})],
)  # fmt: skip
def test_choices_become_options(chosen, read):
    options = parsed(evaluation(*chosen))
    assert {name: options[name] for name in read} == read


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "", ".hidden", "a/b", "--output", "x" * 200])
def test_a_merged_model_is_a_folder_of_the_run(name):
    view = _View(SimpleNamespace(workspace=SimpleNamespace(run=lambda _: None)))
    assert "is not a folder" in view.merge("run", name)


def test_scores_of_hostile_rows_are_shown_as_text():
    hostile = "<img src=x onerror=alert(1)>"
    model = {"exact_match": 0.0, "score": 0.5, "valid": 1.0, "loss": 1.0, "perplexity": None, "token_accuracy": 0.5,
           "fields": {hostile: 1.0}, "scores": [0.5, 1.0], "answers": [hostile, "b"]}  # fmt: skip
    gap = {"value": 0.5, "low": 0.1, "high": 0.9, "more_rows": None}
    result = {"rows": 2, "base": {**model, "scores": [0.0, 1.0]}, "tuned": model, "prompts": [hostile, "p"], "seconds": 1.0,
              "references": ["r", hostile], "score": hostile, "score_difference": gap, "exact_match_difference": None,
              "loss_difference": gap, "data": hostile, "reused": 3}  # fmt: skip
    for order in ("differ", "worst", "best"):
        shown = scores(json.loads(json.dumps(result)), order)
        assert "<img" not in shown and "+0.5 (95" in shown and "3 results" in shown
