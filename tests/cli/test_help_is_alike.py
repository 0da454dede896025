"""`--help` of every command: its group, examples, the same option everywhere."""

import json
from importlib import import_module
from inspect import getclosurevars, signature

import pytest
import typer

from finetune.cli.app import cli

COMMANDS = {name: command for name, command in typer.main.get_command(cli).commands.items() if not command.hidden}
#: Arguments and options of these names have the same flags in each command that has them.
SHARED = ["model", "data", "as_json", "output"]


def test_each_command_has_an_example_and_explained_options_with_the_same_flags_and_runs_are_named_alike():
    for name, command in COMMANDS.items():
        assert f"Example:  finetune {name}" in command.help
    options = [option for command in COMMANDS.values() for option in command.params]
    for name in SHARED:
        assert len({tuple(option.opts) for option in options if option.name == name}) == 1, name
    assert all(option.help for option in options)
    assert all("latest" in option.help for option in options if option.metavar == "RUN")


def test_each_command_that_reads_a_recipe_takes_a_model_and_data(home, finetune):
    readers = [
        name for name, command in COMMANDS.items() if {"source", "overrides"} <= {option.name for option in command.params}
    ]
    readers.remove("resume")  # of a run
    assert {"plan", "run", "data", "convert", "doctor", "sweep"} == set(readers)
    assert all({"model", "data"} <= {option.name for option in COMMANDS[name].params} for name in readers)
    (home / "lora.yaml").write_text("base_model: a/b\nadapter: lora\ndatasets:\n  - {path: x.jsonl, type: alpaca}\n")
    code, shown = finetune("convert", "lora.yaml", "--model", "c/d", "--data", "y.jsonl", "--json")
    assert code == 0
    recipe = json.loads(shown.out)["recipe"]
    assert "c/d" in recipe and "y.jsonl" in recipe and "a/b" not in recipe


@pytest.mark.parametrize("command", cli.registered_commands, ids=lambda command: command.name)
def test_each_function_takes_the_options_of_its_command(command):
    module, name = getclosurevars(command.callback).nonlocals["function"].split(".")
    function = getattr(import_module(f"finetune.cli.{module}"), name)
    options, taken = signature(command.callback).parameters.keys() - {"context", "help_all"}, signature(function)
    taken.bind(**dict.fromkeys([*options, *({"alone"} & taken.parameters.keys())]))


def test_help_lists_eight_options_at_most_help_all_each_and_each_command_in_its_group_on_one_line(finetune, monkeypatch):
    for name, command in COMMANDS.items():
        shown = [option.opts[0] for option in command.params if not option.hidden]
        assert sum(flag.startswith("--") for flag in shown) < 8, name  # and --help
        assert len(shown) == len(command.params) or "--help-all" in shown, name
    assert "--tolerance" in finetune("eval", "--help-all")[1].out
    monkeypatch.setenv("COLUMNS", "80")
    boxes = finetune("--help")[1].out.split("╭─")[2:]
    assert [" ".join(line.split()[1] for line in box.splitlines() if line.startswith("│")) for box in boxes] == [
        "run plan data sweep recipes convert ui", "runs watch pause finish resume compare",
        "eval chat merge export push report serve", "doctor cache",
    ]  # fmt: skip
