"""Runs as the project's writer writes them, for tests of pages that show them."""

import os

import app_ticks
from finetune.events import EventWriter, Step
from finetune.files import write_json
from finetune.run.directory import RunDirectory
from finetune.run.state import process_record


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


def append(run, events):
    writer = EventWriter(run.events)
    for event in events:
        writer.emit(event)
    writer.close()


def step(number, loss=None, total=1000):
    measured = {"peak_allocated_bytes": 10 * 2**30, "peak_reserved_bytes": 11 * 2**30, "reserved_bytes": 11 * 2**30}
    loss = 3.0 / number if loss is None else loss
    return Step(step=number, total_steps=total, epoch=number / 500, loss=loss, step_s=0.5, learning_rate=1e-4, **measured)
