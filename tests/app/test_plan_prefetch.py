"""Neighbouring plans are made ahead in forks, and no question waits for them."""

import os
import time

import pytest

from app.planning.planner import Planner
from app.planning.prefetch import USUAL, PlanPrefetcher, neighbours
from app.planning.process import Questions, _data_key
from app.workspace import Workspace
from finetune.recipe import load_recipe
from finetune.settings import resolved

RECIPE = load_recipe("tiny-cpu")
SETTINGS = resolved(RECIPE, gradient_accumulation_steps=1)


@pytest.fixture
def planned(tmp_path):
    """planned() -> the recipes that were planned, as lines; `planned.note(recipe)` adds one."""
    file = tmp_path / "planned"
    file.touch()

    def read():
        return file.read_text().splitlines()

    def note(recipe):
        with file.open("a") as lines:
            lines.write(f"{os.getpid()} {recipe.lora_r} {recipe.max_length} {recipe.effective_batch_size}\n")

    read.note = note
    return read


def all_neighbours():
    return [recipe for name in USUAL for recipe in neighbours(RECIPE, SETTINGS, name)]


def test_neighbours_differ_in_one_setting_nearest_first_and_are_recipes():
    recipes = all_neighbours()
    changed = [[name for name in USUAL if getattr(recipe, name) != getattr(SETTINGS, name)] for recipe in recipes]
    assert all(len(names) == 1 for names in changed)
    assert [recipe.lora_r for recipe in recipes if recipe.lora_r != 16] == [8, 32, 64, 128, 256]
    assert all(recipe.effective_batch_size % 8 == 0 for recipe in recipes)  # the recipe sets 8 rows at once


def test_every_neighbour_is_planned_in_another_process(planned):
    ahead = PlanPrefetcher(lambda recipe, _: planned.note(recipe))
    ahead.start_from(RECIPE, SETTINGS)
    ahead.wait()
    assert len(planned()) == len(all_neighbours())
    assert os.getpid() not in {int(line.split()[0]) for line in planned()}


def test_a_question_ends_the_work_at_once(planned):
    def make_plan(recipe, _progress):
        planned.note(recipe)
        time.sleep(1000)

    ahead = PlanPrefetcher(make_plan)
    ahead.start_from(RECIPE, SETTINGS)
    while len(planned()) < len(USUAL):
        time.sleep(0.01)
    began = time.monotonic()
    ahead.end()
    assert time.monotonic() - began < 300 and len(planned()) == len(USUAL)
    ahead.wait()
    for line in planned():
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[0]), 0)


@pytest.mark.exhaustive
def test_the_real_planner_forecasts_neighbours_before_they_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")  # as on a user's machine
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    planner = Planner(Workspace(tmp_path, tmp_path / "runs"))
    recipe = "model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct\ndataset: support\ngpu: rtx-3060\nlora_r: 16\nmax_length: 512\n"
    planner.ask("plan", recipe=recipe, free_bytes=None)
    asked = len(list((tmp_path / "cache" / "forecasts").iterdir()))
    while len(list((tmp_path / "cache" / "forecasts").iterdir())) < asked + 6:  # the time limit of the test ends this
        time.sleep(0.1)
    planner.close()


def test_a_plan_that_fails_ahead_does_not_stop_the_others(planned):
    def make_plan(recipe, _progress):
        planned.note(recipe)
        raise RuntimeError("no such plan")

    ahead = PlanPrefetcher(make_plan)
    ahead.start_from(RECIPE, SETTINGS)
    ahead.wait()
    assert len(planned()) > 10


def test_rows_of_a_hub_dataset_that_were_looked_at_are_planned_with(tmp_path):
    """A hub id is no file here; its rows are in memory once the data page has shown them."""
    from finetune.bundled import dataset_paths
    from finetune.planner.planning import encode_rows
    from finetune.recipe import recipe_from

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(dataset_paths("support")["train"].read_text().splitlines(keepends=True)[:8]))
    values = {"model_name_or_path": "tiny", "gpu": "cpu"}
    local, hub = (recipe_from({**values, "dataset": {"path": name}}) for name in (str(path), "owner/name"))
    questions = Questions()
    assert questions.plan(hub).data is None
    questions._encoded[_data_key(hub)] = encode_rows(local)
    assert questions.plan(hub).data == questions.plan(local).data
