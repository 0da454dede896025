"""Plan, page and the preparation of a run on each machine: the right card, the right budget, the same words."""

import json
import sys
from pathlib import Path

import pytest

from app.planning.blocker import blocker_of
from app.planning.process import Questions
from finetune.card import find_card
from finetune.card.device_selection import cards_here
from finetune.cli import main
from finetune.errors import RecipeError
from finetune.planner.choices import Choices
from finetune.planner.plan import Plan, read_plan
from finetune.planner.resources import choose_budget
from finetune.recipe import load_recipe, parse_recipe, write_recipe
from finetune.run.prepare import create_run, prepare
from finetune.units import GIB, MIB

pytestmark = pytest.mark.compiler
RECIPE = parse_recipe("{model_name_or_path: tiny, dataset: rows.jsonl}")
#: What is free on the card that is planned: total less reserve less what all others hold.
FREE_MIB = {
    "4090-desktop": 24564 - 452 - 1612, "two-3090": 24576 - 300 - 12, "3060-and-4090": 24564 - 452 - 100, "t4": 15360 - 443,
    "h200": 143771 - 616, "container": 24564 - 452 - 9000, "wsl": 12282 - 230 - 1400,
    "old-driver": 24576 - 300, "lost-card": 24576 - 300, "gtx-1080-ti": 11264 - 90 - 10,
}  # fmt: skip


@pytest.mark.parametrize("name", FREE_MIB)
def test_the_budget_is_what_is_free_on_the_planned_card(machine, name):
    machine(name)
    _, budget = choose_budget(Choices(RECIPE), find_card("auto"))
    assert 0 <= FREE_MIB[name] * MIB - budget < GIB // 100 + 1


def test_the_context_is_part_of_the_need_and_not_taken_from_the_budget_as_well(machine):
    from finetune.card import record_measurement

    machine("4090-desktop")
    before = choose_budget(Choices(RECIPE), find_card("auto"))[1]
    record_measurement("NVIDIA GeForce RTX 4090", 400 * MIB)
    card = find_card("auto")
    assert card.context_bytes == 400 * MIB and choose_budget(Choices(RECIPE), card)[1] == before


def test_the_page_offers_each_card_of_the_machine(machine):
    machine("two-3090")
    assert cards_here() == [("0: NVIDIA GeForce RTX 3090", "0"), ("1: NVIDIA GeForce RTX 3090", "1")]


def test_without_a_driver_the_page_offers_none(machine):
    machine("t4", "start = 9")
    assert cards_here() == []


@pytest.mark.slow
def test_command_line_and_page_plan_the_same_card_and_say_that_torch_cannot_use_it(machine, capsys, monkeypatch):
    machine("two-3090", cuda=None)
    recipe = load_recipe("tiny-cpu", ["gpu=auto", "dtype=auto"])
    monkeypatch.setattr(sys, "argv", ["finetune", "plan", "tiny-cpu", "gpu=auto", "dtype=auto", "--json"])
    assert main() == 3
    printed = json.loads(capsys.readouterr().out)
    page = Questions().answer({"kind": "plan", "recipe": write_recipe(recipe)})["plan"]
    assert printed["card"] == page["card"] and printed["card"]["uuid"].startswith("GPU-30911111")
    blocker = blocker_of(recipe, Plan.from_json(page), Path.cwd())
    assert "CPU-only build" in printed["card"]["problem"]
    assert "CPU-only build" in blocker.problems[0] and "Install the wheel" in blocker.fix


@pytest.mark.slow
def test_a_run_is_prepared_for_the_card_that_it_names(machine):
    machine("two-3090")
    prepared = prepare(load_recipe("tiny-cpu", ["gpu=0", "dtype=auto", "max_steps=2"]))
    run = create_run(prepared)
    card = read_plan(run.plan).card
    assert card.uuid == "GPU-30900000-aaaa-4bbb-8ccc-000000000001" and card.free_bytes == (24576 - 300 - 1800) * MIB


def test_a_run_on_a_card_that_torch_cannot_use_is_refused_before_anything_is_written(machine, home):
    machine("4090-desktop", cuda=None)
    with pytest.raises(RecipeError, match="CPU-only build"):
        prepare(load_recipe("tiny-cpu", ["gpu=auto"]))
    assert not (home / "runs").exists()
