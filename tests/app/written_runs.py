"""Runs as the project's writer writes them, for tests of pages that show them."""

import os

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import create_trial

import app_ticks
from finetune.events import Evaluation, EventWriter, State, Step
from finetune.files import write_json
from finetune.run.directory import RunDirectory
from finetune.run.held_out import write_row_losses
from finetune.run.state import process_record
from finetune.sweep.sweep import open_sweep, storage_in


def steps(first, last, total=1000):
    return [step(number, total=total) for number in range(first, last + 1)]


def make_run(runs, name, events, total=1000, *, is_alive=False):
    """A run; one that is alive has this process as its worker, so nothing may stop it."""
    run = RunDirectory(runs / name)
    run.path.mkdir(parents=True)
    write_json(run.plan, app_ticks.plan(total).as_json())
    append(run, events)
    if is_alive:
        write_json(run.process, {"worker": process_record(os.getpid())})
    return run


def make_sweep(runs, name):
    """A finished sweep of two learning rates, both trained to the end, the second of which is surely better."""
    steps_evaluated = (5, 10, 20)
    for number, last_loss in enumerate((0.9, 0.5), 1):
        losses = {step: last_loss + (20 - step) / 20 for step in steps_evaluated}
        evaluations = [Evaluation(step=step, eval_loss=loss, eval_s=1.0) for step, loss in losses.items()]
        ended = State(state="finished", exit_code=0)
        run = make_run(runs / name, f"{name}-{number}", [*steps(1, 20, 20), *evaluations, ended], 20)
        for step, loss in losses.items():
            write_row_losses(run, step, loss, [(loss, 3)] * 4)
    study = optuna.create_study(storage=storage_in(runs / name), study_name=name)
    for fact, value in {"swept": {"learning_rate": [1e-4, 4e-4]}, "steps": 20, "left_out": [], "forecast_s": None}.items():
        study.set_user_attr(fact, value)
    rates = CategoricalDistribution([1e-4, 4e-4])
    study.add_trials(
        create_trial(value=loss, params={"learning_rate": rate}, distributions={"learning_rate": rates})
        for rate, loss in ((1e-4, 0.9), (4e-4, 0.5))
    )
    return open_sweep(runs / name)


def append(run, events):
    writer = EventWriter(run.events)
    for event in events:
        writer.emit(event)
    writer.close()


def step(number, loss=None, total=1000):
    measured = {"peak_allocated_bytes": 10 * 2**30, "peak_reserved_bytes": 11 * 2**30, "reserved_bytes": 11 * 2**30}
    loss = 3.0 / number if loss is None else loss
    return Step(step=number, total_steps=total, epoch=number / 500, loss=loss, step_s=0.5, learning_rate=1e-4, **measured)
