"""What is chosen on the page becomes options of the command, which accepts them; nothing typed there becomes an option."""

import pytest

from app.pages.result import evaluation
from app.views import options as page_options
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
    [({}, {"score": None, "data": None, "rows": None, "last": False}),
     ({"score": "regex", "pattern": "--json", "rows": "-x.jsonl", "most": "20", "last": "on"},
      {"score": "regex", "pattern": "--json", "data": "-x.jsonl", "rows": 20, "last": True, "as_json": False}),
     ({"score": "numeric", "pattern": "ignored", "tolerance": "0.01", "most": ""},
      {"score": "numeric", "tolerance": 0.01, "pattern": None})],
)  # fmt: skip
def test_choices_become_options(chosen, read):
    options = parsed(evaluation({"score": "", "pattern": "", "tolerance": "0", "rows": "", "most": "0"} | chosen))
    assert {name: options[name] for name in read} == read
