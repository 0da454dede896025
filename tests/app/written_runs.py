"""Runs as the project's writer writes them, for tests of pages that show them."""

import math
import os

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import create_trial

from finetune.card.card import Card
from finetune.events import Evaluation, EventWriter, State, Step
from finetune.files import write_json
from finetune.memory.forecast import Forecast
from finetune.planner.plan import DataStatistics, Plan, Verdict
from finetune.recipe import load_recipe
from finetune.run.best import write_row_losses
from finetune.run.directory import RunDirectory
from finetune.run.state import process_record
from finetune.settings import resolve_plain
from finetune.sweep import open_sweep, storage_in
from finetune.units import GIB


def steps(first, last, total=1000):
    return [step(number, total=total) for number in range(first, last + 1)]


def make_run(runs, name, events, total=1000, *, is_alive=False):
    """A run; one that is alive has this process as its worker, so nothing may stop it."""
    run = RunDirectory(runs / name)
    run.path.mkdir(parents=True)
    write_json(run.plan, plan(total).as_json())
    append(run, *events)
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
    facts = {"swept": {"learning_rate": [1e-4, 4e-4]}, "arms": 2, "steps": 20, "left_out": [], "forecast_s": None}
    for fact, value in facts.items():
        study.set_user_attr(fact, value)
    rates = CategoricalDistribution([1e-4, 4e-4])
    study.add_trials(
        create_trial(value=loss, params={"learning_rate": rate}, distributions={"learning_rate": rates})
        for rate, loss in ((1e-4, 0.9), (4e-4, 0.5))
    )
    return open_sweep(runs / name)


def append(run, *events):
    writer = EventWriter(run.events)
    for event in events:
        writer.emit(event)
    writer.close()


def step(number, loss=None, total=1000):
    measured = {"peak_allocated_bytes": 10 * 2**30, "peak_reserved_bytes": 11 * 2**30, "reserved_bytes": 11 * 2**30}
    loss = 3.0 / number if loss is None else loss
    return Step(step=number, total_steps=total, epoch=number / 500, loss=loss, step_s=0.5, learning_rate=1e-4, **measured)


def step_event(step, total, chance):
    """An event with every metric of a run on a card."""
    loss = 3 * math.exp(-3 * step / total) + chance.random() / 5 + (3.0 if step % 9973 == 0 else 0.0)
    return Step(
        step=step, total_steps=total, epoch=step / total, loss=loss, learning_rate=2e-4 * (1 - step / total),
        grad_norm=1 + chance.random(), token_accuracy=0.5 + chance.random() / 3, tokens_per_s=3000 + 200 * chance.random(),
        step_s=0.5 + chance.random() / 50, allocated_bytes=9 * GIB, peak_allocated_bytes=10 * GIB + chance.randrange(GIB),
        peak_reserved_bytes=11 * GIB + chance.randrange(GIB // 4), card_used_bytes=12 * GIB + chance.randrange(GIB // 4),
        other_processes_bytes=GIB, process_rss_bytes=3 * GIB, temperature_c=60 + chance.randrange(10),
        power_w=300 + 20 * chance.random(),
    )  # fmt: skip


def plan(steps):
    """A plan for a 24 GiB card, with a forecast for the charts."""
    parts = {"weights": 5 * GIB, "adapters": GIB // 8, "optimizer": GIB // 2, "activations": 4 * GIB, "loss": GIB}
    phases = {"load": 6 * GIB, "train": 10 * GIB}
    peaks = (10 * GIB, 11 * GIB, 12 * GIB, 11 * GIB, 13 * GIB)
    forecast = Forecast(*peaks, parts, phases, step_s=0.5, tokens_per_s=3100.0)
    card = Card("rtx-4090", 24 * GIB, 23 * GIB, (8, 9), context_bytes=GIB // 2)
    recipe = load_recipe("tiny-cpu", ["lora_r=1", "load_in_4bit=false"])
    settings = resolve_plain(recipe, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    rows = DataStatistics(rows=24, eval_rows=6, total_tokens=2367, trained_tokens=934)
    return Plan(settings, {"torch_compile": ""}, card, Verdict.FITS, steps, forecast, rows, budget_bytes=22 * GIB)
