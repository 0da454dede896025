"""A sweep whose arms and driver are killed goes on where it was, and ends as one that nobody killed."""

import itertools
import os
from dataclasses import replace

import pytest

from finetune.events import Step, read_events
from finetune.files import write_json
from finetune.recipe import load_recipe
from finetune.run.state import process_record
from finetune.sweep import driver as driver_module
from finetune.sweep.create import create_sweep
from finetune.sweep.driver import Driver, Stopped
from finetune.sweep.sweep import Sweep, open_sweep, write_sweep

RECIPE = (
    "max_steps=8", "save_steps=2", "eval_steps=2", "effective_batch_size=2", "per_device_train_batch_size=2", "lora_r=4",
    "lora_alpha=8", "dataset.max_rows=40", "dataset.test_split_size=16", "sample_answers=0",
)  # fmt: skip
RATES = {"learning_rate": [1e-4, 4e-3, 4e-2]}


def new_sweep(path):
    def recipe_of(values):
        return load_recipe("tiny-cpu", [*RECIPE, f"output_dir={path}", *(f"{name}={value}" for name, value in values.items())])

    return create_sweep(recipe_of, RATES)


#: Trainings of the sweep, by their number, and after how many of their steps they are killed; 2 is just before a checkpoint.
KILLS = {0: 1, 3: 2, 5: 1}


def drive(sweep, train, monkeypatch, kills):
    """Drive to the end; `kills`: trainings that are killed after a step, and the driver ends with them."""
    numbers = itertools.count()

    def start(run):
        number = next(numbers)

        def killed_after_a_step():
            from finetune.run.callbacks import RunCallback

            original, steps = RunCallback.on_log, itertools.count(1)

            def on_log(self, args, state, control, logs=None, **named):
                original(self, args, state, control, logs, **named)
                if "loss" in logs and next(steps) == kills[number]:
                    os.kill(os.getpid(), 9)

            RunCallback.on_log = on_log

        train(run, killed_after_a_step if number in kills else None)

    monkeypatch.setattr(driver_module.control, "start", start)
    monkeypatch.setattr(driver_module.control, "resume", start)
    stops = 0
    while not sweep.is_finished:
        try:
            Driver(sweep, lambda _: None).drive()
        except Stopped:
            stops += 1
    return stops


def outcome(sweep):
    return sorted((str(result.values), result.dropped_at, tuple(result.curve)) for result in sweep.results())


@pytest.mark.slow
def test_a_sweep_that_was_killed_at_three_moments_ends_as_one_in_one_go(tmp_path, train, monkeypatch):
    whole, killed = new_sweep(tmp_path / "whole"), new_sweep(tmp_path / "killed")
    assert drive(whole, train, monkeypatch, {}) == 0
    assert drive(killed, train, monkeypatch, KILLS) == 3
    assert outcome(killed) == outcome(whole)
    winner = killed.results()[0]
    assert winner.state == "finished" and "wins with a held-out loss of" in killed.sentence()
    steps = [event.step for event in read_events(killed.run_of(killed.facts.arms[1]).events) if isinstance(event, Step)]
    assert sorted(set(steps)) == list(range(1, max(steps) + 1))


@pytest.mark.slow
def test_two_arms_that_train_at_once_end_as_one_after_another(tmp_path, train, monkeypatch):
    """On a CPU, where each run takes what it needs; the cards only say which arms may train at once."""
    in_turn, at_once = new_sweep(tmp_path / "whole"), new_sweep(tmp_path / "at_once")
    drive(in_turn, train, monkeypatch, {})
    arms = tuple(replace(arm, card=card) for arm, card in zip(at_once.facts.arms, "010", strict=True))
    write_sweep(Sweep(at_once.path, replace(at_once.facts, arms=arms)))
    most_at_once = []

    def start(run):
        write_json(run.process, {"worker": process_record(train.start(run))})
        most_at_once.append(len(driver.training))

    monkeypatch.setattr(driver_module.control, "start", start)
    monkeypatch.setattr(driver_module.control, "resume", start)
    driver = Driver(open_sweep(at_once.path), lambda _: None)
    driver.drive()
    assert max(most_at_once) == 2 and outcome(at_once) == outcome(in_turn)
