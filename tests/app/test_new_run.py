"""New run: what a person chose is never lost, the newest question wins, and what is known to stop a run stops it at once."""

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.background import Task, starts
from app.language import use_language
from app.pages.new_run import NewRun
from app.planning import Questions
from app.views import new_run
from app.views.new_run import blocker_of, form
from app.views.run import memory_bar_parts
from app.views.words import in_words
from app.worker import SupersededError, Work, call_method, result_of
from finetune.bundled import dataset_paths
from finetune.card import find_card
from finetune.files import write_json
from finetune.memory.forecast import Forecast
from finetune.planner.plan import Alternative, LayerCopies, Plan, ResourceCheck, Suggestion, Verdict, verdict_of
from finetune.recipe import find_recipe, load_recipe, recipe_from, write_recipe
from finetune.run.state import process_record
from finetune.settings.reference import settings_reference
from finetune.units import GIB

RUNNING = {"state": "running", "process": process_record(os.getpid())}


@pytest.fixture
def page(context, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    context.uploads.mkdir(parents=True)
    monkeypatch.setattr(Task, "begin", lambda task, *_, module: write_json(task.path / "status.json", RUNNING))  # no process
    page, questions = NewRun(context), Questions()

    def call(method, report=lambda _: None, is_wanted=None, **values):
        return result_of(call_method(questions, method, values, Work(report)))

    context.planner.call = call
    return page


@pytest.fixture
def tiny(page):
    page.change({"model": "tiny"})
    page.change({"data": "support"})
    page.change({"gpu": "cpu"})
    return page


def end(start, **result):
    """End the process of a start with this result."""
    write_json(start.path / "status.json", {"state": "done"})
    (start.path / "output.txt").write_text(f"planning ...\n{json.dumps(result)}\n")


def recipe(page):
    return page.context.draft.read().recipe


def plan_of(peak=8, high=9, budget=11, **values):
    forecast = Forecast(
        *[round(peak * GIB)] * 4, round(high * GIB), {"weights": peak * GIB}, {"train": peak * GIB, "load": GIB}
    )
    card, budget = find_card("rtx-3060"), budget * GIB
    plan = Plan(load_recipe("tiny-cpu"), {}, card, verdict_of(forecast, budget), forecast=forecast, budget_bytes=budget,
                headroom_bytes=round(budget - high * GIB))  # fmt: skip
    return replace(plan, **values)


def typed(page, name, text):
    return page.change({"set": name, "text": text})


# -- the draft


def test_a_new_run_begins_without_settings_asks_for_model_and_data_and_before_these_plans_full_rows(page):
    plan = page.plan()
    assert page.context.draft.read().values == {} and plan["start"] is False and plan["parts"]["answer"] == ""
    assert "Choose a model." in plan["parts"]["ready"] and "3-minute demo" in page.screen()["parts"]["sentence"]
    page.change({"model": "tiny"})
    assert "Choose your data." in page.plan()["parts"]["ready"]
    page.change({"gpu": "rtx-4090"})
    parts = page.plan()["parts"]
    assert ">Fits</h2>" in parts["answer"] and "with full rows" in parts["answer"] and "Choose your data." in parts["ready"]


def test_a_shipped_recipe_keeps_model_and_data_and_another_model_the_settings_but_not_the_old_revision(tiny, page):
    tiny.change({"recipe": "7b-4090"})
    assert (recipe(tiny).model_name_or_path, recipe(tiny).dataset.path, recipe(tiny).gpu) == ("tiny", "support", "rtx-4090")
    draft = page.context.draft
    before = draft.write(find_recipe("tiny-cpu").read_text()).values
    typed(page, "model_revision", "a" * 40)
    page.change({"model": "tiny-vision"})
    assert draft.read().values == {**before, "model_name_or_path": "tiny-vision"}


def test_every_edit_has_a_stamp_of_its_own_and_none_is_lost(tiny):
    stamps = [typed(tiny, "lora_r", str(rank))["stamp"] for rank in range(1, 200)]
    assert len(set(stamps)) == len(stamps) and recipe(tiny).lora_r == 199


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"set": "learning_rate", "text": "quick"}, "learning_rate"), ({"set": "lora_r", "text": "-1"}, "lora_r"),
        ({"set": "text", "text": "lora_rr: 3"}, "lora_rr"),
        ({"override": "lora_r=many"}, "lora_r"),
        ({"set": "price_per_hour", "text": "-1"}, "price_per_hour"),
        ({"set": "memory_budget", "text": "much"}, "memory_budget"),
        ({"columns": {"a": "output", "b": "output"}}, "two columns are Answer"),
        ({"upload": "/etc/passwd"}, "was not uploaded here"),
        ({"set": "dataset.test_split_size", "text": "some"}, "test_split_size"),
    ],
)  # fmt: skip
def test_what_can_not_be_done_is_said_and_changes_nothing(tiny, message, reason):
    before = recipe(tiny)
    assert reason in unescape(tiny.change(message)["parts"]["refused"])
    assert recipe(tiny) == before
    with pytest.raises(KeyError):  # not a field of the form
        tiny.change({"set": "trust_remote_code", "text": "true"})
    assert recipe(tiny) == before


def test_a_start_queues_the_draft_under_its_name_and_begins_a_new_one_but_the_demo_leaves_the_draft(tiny):
    typed(tiny, "lora_r", "24")
    assert "In the queue" in tiny.change({"start": True, "name": "bikes / 7B"})["parts"]["starting"]
    [start] = starts(tiny.context.workspace)
    recipe_text = (start.path / "recipe.yaml").read_text()
    assert "lora_r: 24" in recipe_text and "runs/bikes-7B" in recipe_text
    end(start, run="runs/bikes-7B")
    assert 'data-go="/run?run=bikes-7B"' in tiny.screen(start.path.name)["parts"]["progress"]
    assert tiny.screen()["parts"]["progress"] == ""
    assert tiny.context.draft.read().values == {}
    draft = tiny.context.draft
    assert draft.write("model_name_or_path: tiny\ndataset: support\noutput_dir: first\n").recipe.output_dir == "auto"
    tiny.change({"demo": True})
    end(starts(tiny.context.workspace)[-1], run="runs/demo")
    tiny.screen()
    assert draft.read().model == "tiny"


def test_nothing_starts_without_a_model_and_data_or_under_a_name_that_is_taken(page):
    assert "nothing to train" in page.change({"start": True})["parts"]["refused"]
    page.change({"model": "tiny"})
    page.change({"data": "support"})
    (page.context.workspace.runs / "taken").mkdir(parents=True)
    assert "run called taken" in page.change({"start": True, "name": "taken"})["parts"]["refused"]
    assert starts(page.context.workspace) == []


def test_the_form_has_each_setting_once_with_its_name_and_help():
    names, shown = {row.name for row in settings_reference()} - {"trust_remote_code"}, form()
    assert set(re.findall(r'data-field="([^"]+)"', shown)) == names and len(names) > 70
    assert set(re.findall(r'for="key-([^"]+)"', shown)) == {name.replace(".", "-") for name in names}


# -- data


def test_a_table_with_its_own_columns_is_read_as_guessed_without_its_ids(page, tmp_path):
    rows = "".join(f"T-{n},brakes,My bike {n} is broken.,Bring bike {n} on Monday.\n" for n in range(60))
    (tmp_path / "own.csv").write_text(f"ticket,topic,customer_message,our_reply\n{rows}")
    page.change({"model": "tiny"})
    page.change({"data": "own.csv"})
    dataset = recipe(page).dataset
    assert dataset.columns == {"instruction": "customer_message", "output": "our_reply"}
    assert dataset.ignore_columns == ["ticket", "topic"]
    shown = page.panel("look")
    assert "54 rows to train on, 6 held out" in shown and "Bring bike 0" in shown and "T-4" in shown
    assert re.search(r'data-column="ticket".*?<option value="ignore" selected>', shown, re.S)
    page.change({"columns": {"ticket": "ignore", "topic": "input", "customer_message": "instruction", "our_reply": "output"}})
    assert "brakes" in re.search(r'<pre class="ft-marked".*?</pre>', page.panel("look"), re.S)[0]


@pytest.mark.parametrize("name", ["support", "support-pairs", "parcels"])
def test_rows_that_a_run_reads_by_itself_are_not_asked_about(page, name):
    page.change({"data": name})
    assert recipe(page).dataset.columns == {} and "data-column" not in page.panel("look")


@pytest.mark.parametrize(
    ("columns", "roles"),
    [
        ("question,answer,context", ["instruction", "output", "ignore"]), ("instruction,output,reasoning", []), ("a,b,c", []),
        ("instruction,output,notes", ["instruction", "output", "ignore"]),
    ],
)  # fmt: skip
def test_other_text_is_ignored_in_sight_where_a_run_would_ask(page, tmp_path, columns, roles):
    rows = "".join(f"One text {n},Two texts {n},Three texts {n}\n" for n in range(30))
    (tmp_path / "rows.csv").write_text(f"{columns}\n{rows}")
    page.change({"data": "rows.csv"})
    dataset = recipe(page).dataset
    chosen = {name: role for role, name in dataset.columns.items()} | dict.fromkeys(dataset.ignore_columns, "ignore")
    assert chosen == dict(zip(columns.split(","), roles, strict=False))


def test_an_upload_keeps_its_name(page):
    (page.context.uploads / "rows.exe").write_text("")
    assert "not supported" in page.change({"upload": str(page.context.uploads / "rows.exe")})["parts"]["refused"]
    for name in ("rows.jsonl", "rows-2.jsonl"):
        (page.context.uploads / "rows.jsonl").write_text(dataset_paths("support")["train"].read_text())
        page.change({"upload": str(page.context.uploads / "rows.jsonl")})
        assert Path(recipe(page).dataset.path).name == name


# -- the plan


def test_a_number_left_to_the_planner_shows_the_plans(tiny):
    shown = tiny.plan()["parts"]["settings"]
    assert re.search(r'data-set="effective_batch_size"[^>]*value="16"', shown) and "Use recommended" not in shown
    typed(tiny, "effective_batch_size", "8")
    shown = tiny.plan()["parts"]["settings"]
    assert re.search(r'data-set="effective_batch_size"[^>]*value="8"', shown) and "Use recommended" in shown
    typed(tiny, "effective_batch_size", "")
    assert recipe(tiny).effective_batch_size == "auto"


def test_the_newest_question_ends_an_older_one_and_stale_answers_are_not_shown(tiny):
    asked, newer, call = threading.Event(), threading.Event(), tiny.context.planner.call

    def slow(method, recipe, **values):
        if "lora_r: 48" in recipe:
            asked.set()
            assert newer.wait(60)
            raise SupersededError
        return call(method, recipe=recipe, **values)

    tiny.context.planner.call, tiny.context.planner.cancel = slow, lambda method: asked.is_set() and newer.set()
    with ThreadPoolExecutor() as pool:
        typed(tiny, "lora_r", "48")
        first = pool.submit(tiny.plan)
        assert asked.wait(60)
        stamp = typed(tiny, "lora_r", "64")["stamp"]
        newest = tiny.plan()
        assert first.result()["stamp"] == -1
    assert newest["stamp"] == stamp and re.search(r'data-set="lora_r"[^>]*value="64"', newest["parts"]["settings"])


def test_a_plan_is_shown_before_its_alternatives_and_is_chinese_for_a_chinese_reader(tiny):
    first, complete = tiny.plan(), tiny.plan(complete=True)
    assert "being planned" in first["parts"]["plans"] and not first["complete"] and complete["stamp"] == first["stamp"]
    english = "".join(complete["parts"].values())
    assert ">Fits</h2>" in english and "nr-plan" in english
    with use_language("zh"):
        shown = tiny.plan(complete=True)["parts"]
    assert ">放得下</h2>" in shown["answer"] and "梯度检查点" in shown["plans"]


def test_an_error_leaves_only_its_sentence(page):
    page.change({"model": "no/such/folder"})
    page.change({"gpu": "voodoo-2"})
    answer = page.plan()
    assert (
        "voodoo-2" in answer["parts"]["answer"]
        and answer["parts"]["plans"] == answer["parts"]["settings"] == ""
        and answer["start"] is False
    )


def blocked(**values):
    wanted = recipe_from({"model_name_or_path": "tiny", "dataset": "support", "gpu": "cpu", "max_length": 256, **values})
    return wanted, Plan.from_json(Questions().plan(Work(), write_recipe(wanted)))


def test_a_missing_file_where_the_page_was_started_or_a_card_that_is_not_here_blocks_run(page, tmp_path, monkeypatch):
    wanted, plan = blocked(dataset="data/nothere.jsonl")
    blocker = blocker_of(wanted, plan, Path.cwd())
    assert "nothere.jsonl" in blocker.problems[0] and blocker.override == ""
    shown = new_run.verdict(plan, blocker)
    assert 'data-panel="data"' in shown and 'nr-verdict warn"' in shown
    blocker = blocker_of(*blocked(gpu="rtx-3060"), Path.cwd())
    assert blocker.is_elsewhere and "RTX 3060" in blocker.problems[0]
    assert "Planned for another machine" in new_run.blocker_note(blocker)
    assert blocker_of(*blocked(), Path.cwd()) is None
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.jsonl").write_text("{}")
    wanted, plan = blocked(dataset="support")
    wanted = wanted.model_copy(update={"dataset": wanted.dataset.model_copy(update={"path": "data/mine.jsonl"})})
    unread = replace(plan, data=None)  # as where the model's tokenizer is not on this machine yet
    monkeypatch.chdir("/")
    assert blocker_of(wanted, unread, tmp_path) is None
    missing = wanted.model_copy(update={"dataset": wanted.dataset.model_copy(update={"path": "else/mine.jsonl"})})
    assert str(tmp_path) in blocker_of(missing, unread, tmp_path).fix


def test_refused_rows_block_run_with_a_button_that_leaves_them_out(tiny, tmp_path):
    (tmp_path / "bad.jsonl").write_text(dataset_paths("support")["train"].read_text() + '{"messages": []}\n' * 36)
    tiny.change({"data": "bad.jsonl"})
    shown = tiny.plan()
    assert shown["start"] is False and "Leave out 36 rows" in shown["parts"]["answer"] and "Not yet." in shown["parts"]["ready"]
    tiny.change({"override": "dataset.on_bad_rows=skip"})
    assert recipe(tiny).dataset.on_bad_rows == "skip" and tiny.plan()["start"] is True


# -- what the plan is shown as


def test_the_verdict_has_its_gib_time_and_cost_and_layers_that_are_not_on_the_gpu_are_no_green_fit():
    spare = {(8, 9): "2.0 GiB to spare", (10, 12): "1.0 GiB too much", (12, 19): "8.0 GiB too much"}
    for (peaks, gib), title in zip(spare.items(), ("Fits", "Tight", "Does not fit"), strict=True):
        shown = new_run.verdict(plan_of(*peaks))
        assert f"</i>{title}</h2>" in shown and gib in shown
    copies = LayerCopies("", 80, 80, 33 * GIB, GIB, 256 * GIB, 1e10)
    forecast = replace(plan_of().forecast, step_s=125.0)
    slow, slower = (
        new_run.verdict(plan_of(verdict=verdict_of(forecast, 11 * GIB, target), forecast=forecast, layer_copies=copies))
        for target in ("cpu", "nvme")
    )
    assert 'nr-verdict warn"' in slow and ">Fits, slow</h2>" in slow and "33.0 GiB of layers in host memory." in slow
    assert ">Fits, very slow</h2>" in slower and "Layers on disk, 256.0 GiB moved and 2 min 05 s in each step." in slower
    plan = plan_of(total_steps=10)
    plan = replace(plan, forecast=replace(plan.forecast, step_s=360.0))
    assert "about 1 h 00 min" in new_run.verdict(plan)
    assert "10 updates, 2.00" in new_run.verdict(replace(plan, cost=2.0))


@pytest.mark.parametrize("high", [9, 19])
def test_the_bar_is_to_scale_also_beyond_the_gpu(high):
    plan = plan_of(8, high)
    parts, over = memory_bar_parts(plan)
    assert sum(parts.values()) - over == plan.card.total_bytes and over == max(0, high - 11) * GIB
    shown, end = new_run.verdict(plan), 100 * plan.card.total_bytes / (plan.card.total_bytes + over)
    assert sum(map(float, re.findall(r"flex-basis:([\d.]+)%", shown))) == pytest.approx(100, abs=0.01)
    assert f'class="end" style="left:{end:.2f}%"' in shown and ("8.0 GiB too big" in shown) == (high > 11)


def test_when_it_does_not_fit_only_changes_that_do_are_offered_and_a_failed_check_keeps_a_run_from_starting():
    items = [Suggestion(f"lora_r={rank}", rank * GIB, (19 - rank) * GIB, "a smaller adapter") for rank in (4, 9)]
    plan = plan_of(12, 19, suggestions=tuple(items))
    mine = Alternative("", 12 * GIB, 19 * GIB, None, None, Verdict.NO_FIT, "", "", chosen=True)
    assert 'nr-plan"' not in new_run.plans(replace(plan, suggestions=(), alternatives=(mine,)), is_complete=True)
    shown = new_run.plans(plan, is_complete=True)
    assert "LoRA rank 9" in shown and "LoRA rank 4" not in shown
    ready, can_start = new_run.ready(SimpleNamespace(model="a", data="b", is_complete=True), plan, None)
    assert "Choose a plan that fits." in ready and "Start anyway" in ready and not can_start
    plan = plan_of(checks=(ResourceCheck("disk", 175 * GIB, 37 * GIB, False),))
    ready, can_start = new_run.ready(SimpleNamespace(model="a", data="b", is_complete=True), plan, None)
    assert "needs 175.0 GiB of disk; 37.0 GiB are free." in ready and not can_start
    assert 'nr-verdict warn"' in new_run.verdict(plan)


def test_a_change_is_said_without_option_syntax():
    assert in_words("load_in_4bit=true load_in_8bit=false") == "Use 4-bit weights"
    assert (
        in_words("activation_checkpointing=true activation_checkpointing_every_n_layers=3")
        == "Gradient checkpointing in 1 layer of 3"
    )
    assert in_words("per_device_train_batch_size=2 gradient_accumulation_steps=8") == "2 rows at a time"


def test_the_gpus_of_the_panel_are_grouped_by_memory_and_the_chosen_one_is_marked(page):
    page.change({"gpu": "rtx-4090"})
    shown = page.panel("gpu")
    assert shown.index("This machine") < shown.index(">12 GB<") < shown.index(">24 GB<")
    assert re.search(r'data-key="rtx-4090" aria-pressed="true"', shown) and shown.count('aria-pressed="true"') == 1
