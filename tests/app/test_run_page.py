"""A run's page says what happened, at which step and what to press; its buttons do that; a tick sends only what changed."""

import dataclasses
import re
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
import written_runs
from written_runs import append, make_run, step, steps

from app.live import LiveRun
from app.pages.run import RunPage
from app.views.answers import answers
from app.views.run import failure, figures, html_parts, memory, now, progress, title
from finetune.bundled import dataset_paths
from finetune.card import find_card
from finetune.events import Evaluation, OutOfMemory, Result, Retry, Sample, State
from finetune.run.state import RunState
from finetune.units import GIB


@pytest.fixture
def follow(tmp_path):
    """follow(*events) -> a followed run with these events."""

    def make(*events, total=1000):
        live = LiveRun(make_run(Path(mkdtemp(dir=tmp_path)), "one", events, total))
        live.refresh()
        return live

    return make


def test_a_failed_run_shows_its_message_and_offers_to_resume_or_another_run_and_out_of_memory_the_plans_bytes(follow):
    message = "loss is nan at step 20; resume from the last checkpoint with: finetune resume x"
    live = follow(*steps(1, 20), State(state="diverged", message=message))
    card = failure(live, live.state())
    assert f"<h2>Diverged</h2><p>{message}</p>" in card and "Resume</button>" in card and "New run with other settings" in card
    event = OutOfMemory(phase="train", message="Tried to allocate 2.00 GiB.", forecast_allocated_bytes=4 * GIB)
    live = follow(*steps(1, 4), event, State(state="failed", message="out of memory in phase train", exit_code=5))
    card = failure(live, live.state())
    assert "<h2>Failed</h2><p>out of memory in phase train</p><p>Tried to allocate 2.00 GiB." in card
    assert "4.00 GiB allocated" in card and "other settings" in card


def test_the_head_says_what_to_do_in_each_state(follow):
    live = follow(*steps(1, 40), State(state="paused", message="paused at step 40", exit_code=143))
    assert "Paused at step 40." in now(live, live.state()) and "act-resume" in title(live, live.state())
    append(live.run, Result(step=30, eval_loss=0.4512), State(state="finished", exit_code=0))
    live.refresh()
    assert "<b>Best step 30</b>, held-out loss 0.451." in now(live, live.state())
    assert "act-resume" not in title(live, live.state()) and "act-pause" not in title(live, live.state())


def test_values_older_than_five_seconds_say_their_age(follow, monkeypatch):
    live = follow(*steps(1, 10))
    state = SimpleNamespace(state="running", ended=False, message="")
    assert "old" not in progress(live, state)
    now_s = live.digest.newest_step.time_s
    monkeypatch.setattr("app.views.run.time.time", lambda: now_s + 47)
    assert "values are 45 s old" in progress(live, state)
    assert 'aria-valuenow="10"' in progress(live, state) and "1 % · one" in progress(live, state)


def test_figures_have_the_best_evaluation_a_loss_that_is_no_number_and_speed_beside_its_forecast(follow):
    live = follow(*steps(1, 30), *(Evaluation(step=at, eval_loss=loss, eval_s=1.0) for at, loss in ((10, 0.5), (20, 0.6))))
    assert '<dd>0.600</dd><dd class="sub">best 0.500, at step 10</dd>' in figures(live.digest, live.plan())
    live = follow(*steps(1, 10), step(11, float("nan")))
    assert '<dd>not a number</dd><dd class="sub">at step 11, 0.300 at 10 before</dd>' in figures(live.digest, live.plan())
    live = follow(dataclasses.replace(step(1), tokens_per_s=3050.4))
    shown = figures(live.digest, live.plan())
    assert '<dd>3,050</dd><dd class="sub">tokens/s, forecast 3,100</dd>' in shown


def test_on_a_cpu_what_is_not_the_models_is_the_process_libraries_and_memory_above_the_forecast_is_said(follow):
    live = follow(*steps(1, 3))
    plan = dataclasses.replace(live.plan(), card=find_card("cpu"))
    assert "Libraries of the process" in memory(live.digest, plan) and "CUDA" not in memory(live.digest, plan)
    assert "CUDA and allocator" in memory(live.digest, live.plan())
    live = follow(step(1))
    high = dataclasses.replace(written_runs.plan(1).forecast, peak_bytes=9 * GIB, peak_high_bytes=10 * GIB)
    assert "<b>More than forecast.</b> 1.5 GiB" in memory(live.digest, dataclasses.replace(live.plan(), forecast=high))


def test_answers_of_the_first_and_the_newest_step_stand_side_by_side_and_each_picture_has_a_row():
    table = answers([Sample(step=at, prompt="p", expected="a", answer="b") for at in (0, 2, 3)])
    assert "Before training" in table and "Step 3" in table and "Step 2" not in table and table.count("<tr>") == 2
    first, second = (str(dataset_paths("parcels")["train"].parent / "pictures" / f"00{number}.png") for number in range(2))
    samples = [Sample(step=1, prompt="p", expected="a", answer="b", pictures=(path,)) for path in (first, second, "gone.png")]
    table = answers(samples)
    assert table.count("<tr>") == 4 and table.count("data:image/jpeg") == 2 and "image that can no longer be opened" in table


def test_a_tick_sends_only_the_parts_that_the_browser_has_not(page):
    def changed(*shown):
        return page.view.changed("finished", tab="overview", shown=".".join(shown))["parts"]

    stamps = [stamp for stamp, _ in changed().values()]
    assert set(changed()) == {"title", "progress", "now", "tabs", "figures", "memory", "answers"}
    assert changed(*stamps) == {}
    append(page.view.context.workspace.run("finished"), step(5000))
    assert set(changed(*stamps)) == {"progress", "figures", "memory"}


@pytest.fixture
def page(context, kept_run, monkeypatch):
    kept_run(context.workspace.runs)
    queued = []
    monkeypatch.setattr("app.pages.run.resume_run", lambda workspace, run: queued.append(run.path.name))
    return SimpleNamespace(view=RunPage(context), draft=context.draft, queued=queued)


def opened(page, **parameters):
    return re.search('data-run="(.*?)" data-tab="(.*?)"', page.view.html(parameters)).groups()


def pressed(page, **message):
    return page.view.act("finished", message)["said"]


def test_a_run_that_survived_running_out_of_memory_says_so_for_good_and_how(follow):
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    live = follow(
        OutOfMemory(phase="train", message="x"), Retry(attempt=2, reason="out of memory", changes=changes), *steps(1, 400)
    )
    shown = html_parts(live, "overview")["now"]
    assert "Continued with a smaller plan: 2 rows at a time." in shown
    live.digest.newest.pop(Retry.kind)
    assert now(live, live.state()) == ""


def test_finish_asks_and_the_buttons_stay_the_same_from_step_to_step(follow, monkeypatch):
    live = follow(*steps(1, 160, 250), total=250)
    monkeypatch.setattr(live, "state", lambda: RunState("running", "", None))
    before = title(live, live.state())
    assert 'data-confirm="Finish now? {n} of {total} steps are not trained' in before
    append(live.run, step(161))
    live.refresh()
    assert title(live, live.state()) == before


def test_the_address_names_run_and_tab_and_the_buttons_do_what_they_say_also_of_a_tampered_recipe(page, tmp_path):
    assert opened(page, run="finished", tab="details") == ("finished", "details")
    assert opened(page, run="../x", tab="<script>") == ("finished", "overview")
    assert re.search("finetune run /.*/finished/recipe.yaml", page.view.html({"run": "finished"}))
    pressed(page, run="resume")
    assert page.queued == ["finished"]
    assert 'data-go="/"' in pressed(page, run="duplicate")
    assert page.draft.read().values["learning_rate"] == 0.004
    for message in ({}, {"run": "rm"}, {"run": {}}, {"task": "rm"}):
        with pytest.raises(KeyError):
            pressed(page, **message)
    assert len(page.queued) == 1
    assert "not running" in pressed(page, run="pause")
    (tmp_path / "runs/finished/recipe.yaml").write_text("lora_r: many\n")
    assert 'role="alert"' in pressed(page, run="duplicate") and page.draft.read().values["learning_rate"] == 0.004
