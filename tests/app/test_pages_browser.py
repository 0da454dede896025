"""A new user's path in Chromium: choose, see the fit, run, watch, leave, come back, stop, resume, chat, compare.

Fails on any console error or warning, any request to another host and any HTTP 5xx. The run is real: the bundled model and
data, on the CPU. Needs /usr/bin/chromium; the check of accessibility needs npm for axe-core.
"""

import json
import random
import shutil
import time
from pathlib import Path

import psutil
import pytest
from browser import LONG_S, TOKEN, Served, english_texts, served_app
from written_runs import append, make_run, steps

import screenshots
from app.draft import Draft
from app.language import catalogue
from app.workspace import Workspace
from finetune.bundled import dataset_paths
from finetune.events import Sample, State, Step
from finetune.recipe import load_recipe
from finetune.recipe import write_recipe as recipe_text
from finetune.run.directory import RunDirectory

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(4000)]
CURVES = "#run-body .u-wrap"


@pytest.fixture(scope="module")
def served(tmp_path_factory, forecasts, warm_python):
    yield from served_app(tmp_path_factory.mktemp("workspace"), forecasts, warm_python)


def draft_of(served):
    return Draft(Workspace(served.folder, served.folder / "runs"))


def write_recipe(served, **settings):
    draft_of(served).write(recipe_text(load_recipe("tiny-cpu", [f"{name}={value}" for name, value in settings.items()])))


@pytest.fixture(scope="module", autouse=True)
def runs_there(served, kept_run):
    """Two finished runs: one that can be asked, and a copy with hostile texts."""
    finished = RunDirectory(kept_run(served.folder / "runs"))
    events = [
        *(Step(step=step, total_steps=50, loss=3.0 / step, process_rss_bytes=2**30, step_s=0.1) for step in range(1, 51)),
        Sample(step=50, prompt="<img src=x onerror=alert(1)>", answer="\x1b[31m**bold** ${alert(1)} {{value}}"),
        State(state="finished", message="<b>done</b>", exit_code=0),
    ]
    other = make_run(served.folder / "runs", "other run", events)
    shutil.copy(finished.recipe, other.recipe)


def test_a_new_user_gets_from_choosing_to_a_plan(served, visit):
    draft_of(served).clear()
    page = visit("")
    page.click("[data-panel=model]")
    page.click("[data-key=tiny]")
    page.wait_for_selector("[data-part=ready] >> text=Choose your data.")
    page.click("[data-panel=data]")
    page.fill("[data-key=path]", "support")
    page.press("[data-key=path]", "Enter")
    page.wait_for_selector("#nr-panel >> text=rows are ready")
    page.click("#nr-panel [aria-label='next row']")
    page.wait_for_selector("#nr-panel >> text=Row 2")
    assert page.locator("#nr-panel pre mark").count() > 0
    page.click("[data-close]")
    page.wait_for_selector(".nr-verdict.ok")
    assert "GiB" in page.inner_text(".nr-figures")
    page.wait_for_selector("#nr-start:enabled")
    page.evaluate("void (navigator.clipboard.write = () => Promise.reject())")
    with page.expect_download() as download:
        page.click("[data-copy]")
    assert Path(download.value.path()).read_bytes()[1:4] == b"PNG" and download.value.suggested_filename.startswith("tiny · ")


def test_a_run_is_left_paused_and_resumed_from_another_tab(served, visit):
    """It never ends by itself: how fast this machine trains does not matter."""
    write_recipe(served, max_steps=100_000, save_steps=5, eval_steps=0)
    page = visit("")
    page.click("#nr-start:enabled")
    page.wait_for_url("**/run?run=*")
    address = page.url.removeprefix(served.link)
    page.wait_for_selector(CURVES, state="attached")
    before = page.inner_text("#run-head .ft-progress")
    page.wait_for_function("before => document.querySelector('#run-head .ft-progress').innerText != before", arg=before)
    page.close()
    second_tab = visit(address)
    second_tab.click("[data-key=act-pause]")
    second_tab.wait_for_selector("#run-head [data-state=paused]")
    second_tab.click("[data-key=act-resume]")
    second_tab.wait_for_selector("#run-body .ftc-marks >> text=resume")
    second_tab.wait_for_selector("#run-head [data-state=running]")
    second_tab.once("dialog", lambda dialog: dialog.dismiss())
    second_tab.click("[data-key=act-finish]")
    second_tab.click("[data-key=act-pause]")
    second_tab.wait_for_selector("#run-head [data-state=paused]")


def test_a_run_and_its_base_answer_side_by_side(visit):
    page = visit("run?run=finished&tab=chat")
    page.wait_for_selector("#chat-turns >> text=one after the other, side by side")
    page.fill("#chat-question", "Route this message: <b>my tent</b> is torn")
    page.click("#chat-send")
    page.wait_for_selector("#chat-turns .ft-turn.tuned")
    page.wait_for_selector("#chat-turns [aria-busy=false]")
    assert page.locator("#chat-turns .ft-turn.base").count() == 1
    assert "<b>my tent</b>" in page.inner_text("#chat-turns .ft-turn.user p")
    assert "no answer" not in page.inner_text("#chat-turns")


def test_pairs_are_picked_planned_and_trained(served, visit):
    write_recipe(served, max_steps=2, eval_steps=2, sample_answers=0, learning_rate=3e-4, load_in_4bit="false")
    page = visit("")
    page.click("[data-panel=data]")
    page.fill("[data-key=path]", "support-pairs")
    page.click("#nr-panel >> text=Use it")
    page.wait_for_selector("#nr-panel >> text=450 of 450 rows are ready")
    page.wait_for_selector("#nr-panel pre mark")
    page.click("[data-close]")
    page.wait_for_selector(".nr-verdict.ok")
    page.click("#nr-start:enabled")
    page.wait_for_url("**/run?run=*")
    page.wait_for_selector("#run-head [data-state=finished]")
    page.click("text=More curves")
    for curve in ("Reward margin", "Held-out answers in order"):
        page.wait_for_selector(f"#run-body >> text={curve}")


def test_an_app_that_was_killed_and_started_again_shows_the_same_and_takes_what_was_typed_meanwhile(
    served, chromium, visit, warm_python
):
    write_recipe(served, lora_r=16)
    run = make_run(served.folder / "runs", "at work", steps(1, 10), is_alive=True)
    context = chromium.new_context()  # of which the console has the connections that are refused
    context.set_default_timeout(LONG_S * 1000)
    fit, followed = context.new_page(), context.new_page()
    fit.goto(f"{served.link}?token={TOKEN}")
    settled(fit)
    fit.route("**/ft/new/change", lambda route: route.fulfill(status=413, body="It is too large."), times=1)
    fit.click("[data-panel=recipe]")
    fit.click("[data-use-text]")  # refused, and not sent again
    fit.wait_for_selector("#nr-panel >> text=It is too large.")
    fit.wait_for_selector("body:not([data-unsaved])")
    fit.click("[data-close]")
    followed.goto(f"{served.link}run?run=at%20work")
    followed.wait_for_selector("#run-head >> text=Step 10 of")
    address = "run?run=other%20run"
    seen = visit(address)
    seen.wait_for_selector(CURVES, state="attached")
    before = seen.inner_text("#run-body .u-legend")
    events = (served.folder / "runs/other run/events.jsonl").read_bytes()
    seen.close()
    planner = planner_of(served)
    planner.suspend()
    type_number(fit, "lora_r", 27)
    fit.wait_for_selector("body[data-planning]:not([data-unsaved])")
    served.kill()
    planner.kill()
    type_number(fit, "lora_r", 40)
    fit.wait_for_selector("body[data-unsaved]")
    fit.wait_for_selector("[data-part=lost] >> text=No answer from the page's server.")
    append(run, *steps(11, 12))
    followed.wait_for_selector("#run-lost:not([hidden])")
    served.start(warm_python, port=served.link.strip("/").rpartition(":")[2])
    fit.wait_for_selector("body:not([data-unsaved])")
    assert settled(fit)[1] == 40 == drafted(served)[1]
    followed.wait_for_selector("#run-head >> text=Step 12 of")
    followed.wait_for_selector("body:not([data-lost])")
    context.close()
    shutil.rmtree(run.path)
    write_recipe(served)
    reopened = visit(address)
    reopened.wait_for_selector(CURVES, state="attached")
    assert reopened.inner_text("#run-body .u-legend") == before
    assert (served.folder / "runs/other run/events.jsonl").read_bytes() == events


def test_two_apps_on_one_folder_start_one_run_once(served, visit, warm_python):
    other = Served(served.folder).start(warm_python)
    try:
        write_recipe(served, max_steps=2, save_steps=0, eval_steps=0, max_grad_norm=7)
        before = set((served.folder / "runs").glob("[!.]*/plan.json"))
        page = visit("")
        page.wait_for_selector(".nr-verdict.ok")
        page.dblclick("#nr-start:enabled")
        page.wait_for_url("**/run?run=*")
        page.wait_for_selector("#run-head [data-state=finished]")
        assert "Finished" in page.title()
        assert len(set((served.folder / "runs").glob("[!.]*/plan.json")) - before) == 1
    finally:
        other.kill()


def test_hostile_names_and_words_are_shown_as_text(served, visit):
    page = visit("run?run=other%20run&tab=answers")
    page.wait_for_selector(".ft-pane-answers td")
    cells = page.locator(".ft-pane-answers td").all_inner_texts()
    assert "<img src=x onerror=alert(1)> \nCopy image" in cells
    assert "**bold** ${alert(1)} {{value}}" in cells
    assert page.locator("#run-body img").count() == 0
    page.click(".ft-tabs [data-tab=details]")
    page.wait_for_selector(".ft-pane-details >> text=<b>done</b>")


def planner_of(served):
    children = psutil.Process(served.process.pid).children()
    return next(child for child in children if "planning" in " ".join(child.cmdline()))


def type_number(page, name, number):
    page.fill(f"#nr-{name}", str(number))
    page.press(f"#nr-{name}", "Enter")


def settled(page):
    """Wait until the plan shown is that of the draft; returns the numbers as they then stand."""
    page.wait_for_selector("#nr-lora_r")
    page.wait_for_selector("body:not([data-planning]):not([data-unsaved])")
    return [int(page.input_value(f"#nr-{name}")) for name in ("max_length", "lora_r", "effective_batch_size")]


def drafted(served):
    recipe = draft_of(served).read().recipe
    return [recipe.max_length, recipe.lora_r, recipe.effective_batch_size]


def test_no_choice_of_a_number_is_lost_and_each_goes_back_but_a_wrong_one_is_not_taken(served, visit):
    write_recipe(served, max_length=256, lora_r=16, effective_batch_size=8, per_device_train_batch_size="auto")
    page = visit("")
    settled(page)
    for wrong in ("99999", "3.7", "-1"):
        type_number(page, "lora_r", wrong)
        page.click("#nr-start:enabled")
        assert page.evaluate("document.querySelector('#nr-lora_r').validationMessage"), wrong
    assert drafted(served)[1] == 16 and page.inner_text("[data-part=starting]") == ""
    chance = random.Random(0)
    for _ in range(200):
        page.evaluate(
            """([name, number]) => { const box = document.querySelector(`#nr-${name}`); box.value = number;
                box.dispatchEvent(new Event("change", { bubbles: true })); }""",
            [chance.choice(("lora_r", "max_length", "effective_batch_size")), chance.randrange(8, 200)],
        )
    for name, number in (("max_length", 512), ("lora_r", 128), ("effective_batch_size", 16)):
        type_number(page, name, number)
    assert settled(page) == drafted(served) == [512, 128, 16]
    page.click("[data-key='auto-lora_r']")
    page.wait_for_selector("[data-key='auto-lora_r']", state="detached")
    assert "lora_r" not in draft_of(served).read().values


def test_a_panel_that_is_opened_as_another_closes_stays_and_is_filled(visit):
    page = visit("")
    page.route("**/ft/new/change", lambda route: (time.sleep(2), route.continue_()))
    page.click("[data-panel=model]")
    page.click("[data-key=tiny]")
    page.evaluate("document.querySelector('#nr-panel').close(); document.querySelector('[data-panel=data]').click()")
    page.wait_for_selector("body:not([data-unsaved])")
    page.wait_for_selector("#nr-panel[open] [data-upload]")


def test_a_field_of_all_settings_and_the_recipe_follow_each_other(served, visit):
    write_recipe(served)
    page = visit("")
    settled(page)
    page.route("**/panel/settings*", lambda route: (time.sleep(3), route.continue_()))  # ticks come before the panel
    page.click("[data-panel=settings]")
    page.click("#nr-panel details:has([data-field=weight_decay]) > summary")
    page.fill("[data-field=weight_decay]", "0.25")
    page.press("[data-field=weight_decay]", "Tab")
    page.wait_for_selector("body:not([data-unsaved])")
    assert draft_of(served).read().values["weight_decay"] == 0.25
    page.fill("[data-field=weight_decay]", "much")
    page.press("[data-field=weight_decay]", "Tab")
    page.wait_for_selector("[data-part=refused] >> text=weight_decay")
    write_recipe(served, weight_decay=0.5)
    page.wait_for_function("document.querySelector('[data-field=weight_decay]').value === '0.5'")
    page.fill("[data-field=weight_decay]", "0.35")
    page.reload()
    settled(page)
    page.click("[data-panel=recipe]")
    page.wait_for_function("document.querySelector('#nr-text')?.value.includes('weight_decay: 0.35')")
    page.fill("#nr-text", page.input_value("#nr-text") + "max_grad_norm: 7\n")
    page.click("[data-use-text]")
    page.wait_for_selector("body:not([data-unsaved])")
    assert draft_of(served).read().values["max_grad_norm"] == 7


def test_what_is_typed_while_an_edit_is_on_its_way_is_kept_when_the_page_is_left(served, visit):
    write_recipe(served, lora_r=16)
    page = visit("")
    settled(page)
    pending = []
    page.route("**/ft/new/change", lambda route: route.continue_() if pending else pending.append(route))
    type_number(page, "lora_r", 24)
    page.fill("#nr-lora_r", "32")
    page.click("nav [href='/runs']")
    page.wait_for_selector("#runs-list")
    assert pending
    page.goto(served.link)
    assert settled(page)[1] == 32 == drafted(served)[1]


def test_problems_of_the_data_are_walked_and_left_out(served, visit):
    rows = [json.loads(line) for line in dataset_paths("support")["train"].read_text().splitlines()]
    rows[3]["messages"][0]["role"] = "usr"
    rows[5]["messages"][1]["content"] = ""
    (served.folder / "typed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_recipe(served, dataset="typed.jsonl")
    page = visit("")
    page.click("[data-panel=data]")
    page.click("#nr-panel li:has-text('the answer is empty') >> text=Walk")
    page.wait_for_selector("#nr-panel >> text=typed.jsonl, row 6")
    page.click("text=Leave all 2 out")
    page.wait_for_selector("#nr-panel >> text=All 2 are left out")
    page.click("[data-close]")
    page.wait_for_selector("#nr-start:enabled")


#: What test_run_browser.py looks at.
RUN_PAGES = {"run", "answers", "chat", "use"}
LARGE_BATCH = {"per_device_train_batch_size": 64, "effective_batch_size": 64}


@pytest.mark.npm
def test_every_page_is_accessible_and_can_be_used_at_phone_width(served, visit, require_accessible):
    write_recipe(served)
    page = visit("")
    pages = {name: address for name, address in screenshots.ADDRESSES.items() if name not in RUN_PAGES}
    for name, address in {**pages, "too big": ""}.items():
        if name == "too big":
            write_recipe(served, gpu="rtx-4090", memory_budget="600MiB", **LARGE_BATCH)
        page.goto(f"{served.link}{address}")
        page.wait_for_selector("h1.ft-title")
        page.wait_for_timeout(1200)
        if address == "":
            page.wait_for_selector(f".nr-verdict.{'bad' if name == 'too big' else 'ok'}")
        page.wait_for_function("!document.querySelector('.ft-busy, body[data-planning]')")
        require_accessible(page, name)
        for panel in ("model", "data", "gpu", "settings", "recipe") if name == "new run" else ():
            page.set_viewport_size({"width": 1360, "height": 900})
            page.click(f"[data-panel={panel}]")
            page.wait_for_selector("#nr-panel h2")
            page.wait_for_function("!document.querySelector('.ft-busy')")
            require_accessible(page, panel)
            page.click("[data-close]")
    page.click("nav [popovertarget]")
    require_accessible(page, "this machine")
    page.select_option("[data-theme-choice]", "dark")
    page.wait_for_timeout(500)
    assert page.inner_text("body.dark #new-run > [data-part=refused]") == ""


#: Models, files, settings and their values, and what the run with hostile texts has: the same in every language.
KEPT = (
    r"[\w-]+(/[\w.-]+)+|other run|finished|tiny(-\w+)?|support|messages|adamw.torch|cosine|MLP|\b[a-z]+(_\w+)+\b|float32|sdpa|"
    r"all-linear|\b(cpu|gpu|dtype|vision|packing|optim|true|false|None|ID)\b|rows\.jsonl|PNG|Enter|Shift|GGUF|llama\.cpp|Ollama|"
    r"<.*>|[*$].*"
)


@pytest.mark.parametrize("language", ["zh-CN", "en-US"])
def test_every_page_is_in_the_language_of_the_browser(served, visit, language):
    """In English, where the texts are seen to be found, a few of the pages."""
    write_recipe(served)
    page = visit("", locale=language)
    tabs = ("overview", "answers", "chat", "use", "details")
    others = {
        name: address for name, address in screenshots.ADDRESSES.items() if not address.startswith("run?") and name != "run"
    }
    addresses = {**others, **{tab: f"run?run=other%20run&tab={tab}" for tab in tabs}}
    names = ("new run", "overview", "use") if language == "en-US" else addresses
    for name, address in ((name, addresses[name]) for name in names):
        page.goto(f"{served.link}{address}")
        page.wait_for_selector("h1.ft-title")
        page.wait_for_timeout(2000)
        if name == "new run":
            settled(page)
        page.wait_for_function("!document.querySelector('.ft-busy, body[data-planning]')")
        page.click("nav [popovertarget]")
        english = english_texts(page, KEPT)
        if language == "zh-CN":
            assert set(english) & catalogue("zh").keys() == set(), name
        else:
            assert len(english) > 10, name
    assert page.get_attribute("html", "lang").startswith(language[:2])


#: What has the focus: an element keeps its number when others come and go.
FOCUSED = """(() => { const at = document.activeElement; window.stops ??= 0;
    return `${at.tagName} ${at.id} ${at.stop ??= ++window.stops}`; })()"""


def stops_of(page, last=""):
    """What has the focus after each Tab from the top, until it is `last` or comes again."""
    stops = []
    while (stop := (page.keyboard.press("Tab"), page.evaluate(FOCUSED))[1]) not in stops and len(stops) < 150:
        stops.append(stop)
        if last and f" {last} " in stop:
            break
    return stops


def test_start_and_the_page_are_a_few_tabs_away_and_start_is_always_in_sight(served, visit):
    write_recipe(served)
    page = visit("")
    settled(page)
    page.wait_for_selector("#nr-start:enabled")
    for width, height in ((1440, 900), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        for position in (0, 10_000):
            page.evaluate("position => window.scrollTo(0, position)", position)
            box = page.locator("#nr-start").bounding_box()
            assert box["y"] >= 0 and box["y"] + box["height"] <= height, (width, position, box)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "ft-main"
    page.goto(served.link)
    page.wait_for_selector("#nr-start:enabled")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert 2 + len(stops_of(page, "nr-start")) <= 12


def test_the_keyboard_stops_at_controls_and_never_at_the_body(served, visit):
    write_recipe(served)
    for name, last in {"new run": "nr-start", "use": "result-gguf"}.items():
        page = visit(screenshots.ADDRESSES[name])
        page.wait_for_selector(f"#{last}", state="attached")
        page.wait_for_timeout(3000)
        *stops, _ = stops_of(page)
        assert len(stops) > 12 and "BODY" not in str(stops), stops


def test_the_app_holds_no_cuda_context_and_no_torch(served):
    """The pages' process reads files; what needs torch is in processes of its own."""
    maps = Path(f"/proc/{served.process.pid}/maps").read_text()
    assert "libtorch" not in maps and "libcuda" not in maps
