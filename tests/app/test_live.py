"""A followed run: reads only what is new, is the same however often it is read, and survives a restart of the app."""

import dataclasses
import re

import pytest
import written_runs
from written_runs import append

from app.live import LiveRun
from app.views.charts import _memory_lines, measured_peak
from app.views.run import figures, memory
from finetune.card import find_card
from finetune.events import EventWriter, Phase, Retry, Sample, State, Step
from finetune.memory.forecast import Forecast
from finetune.run.directory import RunDirectory
from finetune.units import GIB


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path)


def write_steps(run, first, last):
    values = {"total_steps": 1000, "process_rss_bytes": 2**30, "step_s": 0.5}
    append(run, *(Step(step=step, loss=10.0 / step, **values) for step in range(first, last + 1)))


def followed(run, *events):
    append(run, *events)
    live = LiveRun(run)
    live.refresh()
    return live


def test_reading_at_once_and_in_pieces_gives_the_same(run):
    pieces = LiveRun(run)
    for first in range(1, 100, 10):
        write_steps(run, first, first + 9)
        pieces.refresh()
    assert followed(run).digest == pieces.digest


def test_nan_and_unknown_kinds_do_no_harm(run):
    append(run, Step(step=1, total_steps=9, loss=float("nan"), grad_norm=None))
    with run.events.open("a") as file:
        file.write('{"kind": "news of a later version", "step": ["?"]}\n{"kind": "step", "step": ["?"], "loss": {}}\n')
    live = followed(run, Step(step=2, total_steps=9, loss=1.5))
    assert live.digest.series["loss"].points() == [(1.0, None), (2.0, 1.5)]


@pytest.mark.parametrize(("others", "measured"), [(2 * GIB, 8.5), (None, 8.25)], ids=["reported", "not reported"])
def test_the_forecast_of_the_process_is_compared_with_the_process_without_other_programs(run, others, measured):
    card = dataclasses.replace(find_card("rtx-4090"), context_bytes=GIB // 4)
    memory_bytes = {"reserved_bytes": 7 * GIB, "card_used_bytes": 7 * GIB + GIB // 2 + 2 * GIB, "other_processes_bytes": others}
    live = followed(run, Step(step=1, loss=1.0, peak_reserved_bytes=8 * GIB, process_peak_rss_bytes=3 * GIB, **memory_bytes))
    forecast = Forecast(6 * GIB, 7 * GIB, 8 * GIB, 6 * GIB, 9 * GIB, {"weights": 4 * GIB}, {"train": 6 * GIB})
    plan = dataclasses.replace(written_runs.plan(1), card=card, forecast=forecast, budget_bytes=None)
    assert measured_peak(live.digest, plan) == measured * GIB
    (reserved,) = [line for line in _memory_lines(live.digest, plan) if line.css == "process"]
    assert max(size for _, size in reserved.points) == measured * GIB
    assert f'aria-label="Process: measured {measured:.1f} GiB, forecast 8.0 GiB"' in memory(live.digest, plan)
    assert f'<dd>{measured:.1f} GiB</dd><dd class="sub">forecast 8.0 GiB' in figures(live.digest, plan)


def test_no_number_of_a_damaged_file_stops_the_page(run):
    write_steps(run, 1, 3)
    names = ("step", "total_steps", "loss", "step_s", "peak_allocated_bytes", "temperature_c", "time_s")
    with run.events.open("a") as file:
        for name in names:
            for number in ("9" * 400, "1e999", "-1e999", "NaN", '"nan"', "-5", "1.5"):
                values = {"step": "4", "total_steps": "9", "loss": "1.0", name: number}
                fields = ", ".join(f'"{key}": {value}' for key, value in values.items())
                file.write(f'{{"kind": "step", {fields}}}\n')
    live = followed(run)
    assert live.digest.step and live.state().step == live.digest.step
    assert live.digest.pace.left_s is not None and live.digest.series["loss"].points()


def test_a_long_history_is_read_in_pieces(run, monkeypatch):
    monkeypatch.setattr("app.live._PIECE_BYTES", 2**10)
    write_steps(run, 1, 5000)
    live = LiveRun(run)
    assert live.refresh(0) is False and 0 < live.digest.step < 5000 and 0 < live.read_share < 1
    assert live.state().step == 5000
    assert live.refresh(60) and live.digest.step == 5000 and live.read_share == 1


def test_a_line_that_is_being_written_does_not_change_the_state(run, monkeypatch):
    monkeypatch.setattr("finetune.run.state._TAIL_BYTES", 2**10)
    monkeypatch.setattr("finetune.run.state.is_alive", lambda _: True)
    EventWriter(run.events).emit(State(state="running"))
    write_steps(run, 1, 100)
    live = LiveRun(run)
    assert live.refresh(60)
    with run.events.open("a") as file:
        file.write('{"kind": "step", ')
    assert live.refresh(60) and live.state().state == "running"


def test_peaks_are_those_since_the_last_retry_which_changed_what_the_forecast_is_of(run):
    live = followed(
        run,
        Step(step=1, loss=1.0, peak_allocated_bytes=6 * GIB),
        Retry(attempt=2, reason="out of memory", changes={"per_device_train_batch_size": 1}),
        Step(step=1, loss=1.0, peak_allocated_bytes=4 * GIB),
    )
    assert live.digest.peaks == {"peak_allocated_bytes": 4 * GIB}
    assert live.digest.phase_peaks == {"train": 4 * GIB}


def test_the_allocators_peaks_are_shown_by_phase_beside_their_forecast(run):
    events = [Step(step=1, loss=1.0, peak_allocated_bytes=peak) for peak in (6 * GIB, 5 * GIB)]
    events = [Phase(phase="load", peak_allocated_bytes=4 * GIB), *events, Phase(phase="evaluate", peak_reserved_bytes=3 * GIB)]
    digest = followed(run, *events)
    peaks = {"load": 4 * GIB, "train": 6 * GIB, "eval": GIB}
    forecast = Forecast(6 * GIB, 7 * GIB, 8 * GIB, 6 * GIB, 9 * GIB, {"weights": 4 * GIB}, peaks)
    plan = dataclasses.replace(written_runs.plan(1), forecast=forecast)
    shown = memory(digest.digest, plan)
    labels = re.findall(r'class="track" role="img" aria-label="([^"]*)"', shown)
    assert labels[1:] == [
        "Loading: measured 4.0 GiB, forecast 4.0 GiB", "Training: measured 6.0 GiB, forecast 6.0 GiB",
    ]  # fmt: skip
    assert "\N{EN DASH}" not in shown


def test_answers_of_the_first_evaluation_stay_once_and_the_newest_others(run):
    live = followed(run, *(Sample(step=step, prompt=f"{n}", answer="a") for step in (50, 50, 100, 150) for n in range(16)))
    assert [sample.step for sample in live.digest.samples] == [50] * 16 + [100] * 8 + [150] * 16
