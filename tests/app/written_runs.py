"""Runs as the project's writer writes them, for tests of pages that show them."""

import os

import app_ticks
from finetune.events import Evaluation, EventWriter, State, Step
from finetune.files import write_json
from finetune.run.directory import RunDirectory
from finetune.run.state import process_record
from finetune.sweep.halving import RULE
from finetune.sweep.sweep import ArmFacts, Sweep, SweepFacts, write_sweep


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
    rates, rungs = [1e-4, 4e-4], (5, 10, 20)
    arms = tuple(ArmFacts(f"{name}-{number}", {"learning_rate": rate}) for number, rate in enumerate(rates, 1))
    sweep = Sweep(runs / name, SweepFacts("", {"learning_rate": rates}, arms, rungs, RULE))
    for arm, last_loss in zip(arms, (0.9, 0.5), strict=True):
        losses = {rung: last_loss + (rungs[-1] - rung) / 20 for rung in rungs}
        evaluations = [Evaluation(step=rung, eval_loss=loss, eval_s=1.0) for rung, loss in losses.items()]
        run = make_run(sweep.path, arm.name, [*steps(1, 20, 20), *evaluations, State(state="finished", exit_code=0)], 20)
        (run.path / "evaluations").mkdir()
        for rung, loss in losses.items():
            write_json(
                run.path / "evaluations" / f"held-out-{rung}.json", {"mean": loss, "losses": [loss] * 4, "tokens": [3] * 4}
            )
    write_sweep(sweep)
    return sweep


def append(run, events):
    writer = EventWriter(run.events)
    for event in events:
        writer.emit(event)
    writer.close()


def step(number, loss=None, total=1000):
    measured = {"peak_allocated_bytes": 10 * 2**30, "peak_reserved_bytes": 11 * 2**30, "reserved_bytes": 11 * 2**30}
    loss = 3.0 / number if loss is None else loss
    return Step(step=number, total_steps=total, epoch=number / 500, loss=loss, step_s=0.5, learning_rate=1e-4, **measured)
