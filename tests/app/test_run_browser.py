"""A run's page in Chromium: its tabs and old addresses, what one tick asks for, a lost server, and that nothing moves.

Fails on any console message, any request to another host and any HTTP 5xx.
"""

import pytest
from written_runs import append, make_run, step, steps

from finetune.events import Checkpoint, Evaluation, Result, Sample, State

pytestmark = [pytest.mark.browser, pytest.mark.npm, pytest.mark.slow, pytest.mark.timeout(2400)]

TABS = ("overview", "answers", "chat", "use", "details")


def filled(runs, name, state="running", last=300):
    """A run with everything that a page can show; one that is lost has no process."""
    events = [State(state="running"), *steps(1, last, 600), Evaluation(step=last, eval_loss=0.5, eval_s=1.0)]
    events += [Checkpoint(step=last, path="x", bytes=1, save_s=0.1, seal_s=0.1)]
    events += [Sample(step=at, prompt="Where is it?", expected="on its way", answer="on the way") for at in (100, last)]
    if state not in ("running", "lost"):
        events += [Result(step=last, eval_loss=0.5), State(state=state, message="<b>why</b>", exit_code=0)]
    return None if (runs / name).exists() else make_run(runs, name, events, 600, is_alive=state == "running")


def test_tabs_are_addresses(served, visit):
    filled(served.runs, "tabbed")
    page = visit("run?run=tabbed&tab=answers")
    page.wait_for_selector(".ft-pane-answers >> text=Not evaluated yet")
    for tab in TABS:
        page.click(f".ft-tabs [data-tab={tab}]")
        page.wait_for_selector(f".ft-tabs [data-tab={tab}][aria-current=page]")
        assert page.evaluate("[...document.querySelectorAll('.ft-pane')].filter((pane) => pane.offsetParent).length") == 1
        assert page.url.endswith(f"/run?run=tabbed&tab={tab}")
    page.wait_for_selector(".ft-pane-details >> text=End of the log")
    page.go_back()
    page.wait_for_selector(".ft-tabs [data-tab=use][aria-current=page]")
    page.wait_for_selector(".ft-pane-use >> text=Not run yet")
    samples = visit("run?run=tabbed&tab=answers", permissions=["clipboard-read", "clipboard-write"])
    samples.wait_for_selector(".ft-pane-answers td.mono")
    samples.click(".ft-pane-answers [data-copy]")
    samples.wait_for_selector(".ft-pane-answers [data-copy] >> text=Copied")


def test_what_is_typed_in_a_form_stays_while_its_tab_is_followed(served, visit):
    filled(served.runs, "later")
    page = visit("run?run=later&tab=answers")
    page.wait_for_selector(".ft-pane-answers >> text=Not evaluated yet")
    for score, is_shown in (("exact", False), ("regex", True)):
        page.select_option("#result-score", score)
        assert page.is_visible("#result-pattern") is is_shown and not page.is_visible("#result-tolerance")
    page.fill("#result-pattern", "a+")
    page.fill("#result-rows", "-3")
    page.click("#result-eval")
    assert page.evaluate("document.querySelector('#result-rows').validationMessage")
    page.click(".ft-tabs [data-tab=use]")
    page.click(".ft-tabs [data-tab=answers]")
    page.wait_for_timeout(1500)
    assert page.input_value("#result-pattern") == "a+" and page.text_content("#result-status") == ""


def test_a_running_run_asks_twice_in_a_tick_for_all_that_is_new(served, visit):
    run = filled(served.runs, "ticking")
    page = visit("run?run=ticking")
    page.wait_for_selector("#run-head >> text=Step 300 of 600")
    page.wait_for_function("document.querySelector('ft-chart')?.charts?.length")
    page.wait_for_timeout(1500)
    asked = "performance.getEntriesByType('resource').filter((x) => x.startTime > {}).map((x) => [x.name, x.decodedBodySize])"
    began = page.evaluate("performance.now()")
    for number in range(301, 311):
        append(run, step(number, total=600))
        page.wait_for_selector(f"#run-head >> text=Step {number} of 600")
    entries = page.evaluate(asked.format(began))
    routes = {
        route: [size for name, size in entries if route in name] for route in ("/ft/series/", "/ft/run/", "/ft/page/rail")
    }
    seconds = (page.evaluate("performance.now()") - began) / 1000
    assert sum(map(len, routes.values())) == len(entries)
    for sizes, each_s in zip(routes.values(), (1, 1, 3), strict=True):  # the chart, the parts of the page, the rail
        assert 0 < len(sizes) <= seconds / each_s + 2 and max(sizes) < 4096


def test_a_lost_server_dims_the_head_until_it_is_back_and_the_end_shows_what_to_do_without_a_reload(served, visit):
    run = filled(served.runs, "silent")
    page = visit("run?run=silent")
    page.wait_for_selector("#run-head >> text=Step 300 of 600")
    page.route("**/ft/{series,run}/**", lambda _: None)  # no answer
    page.wait_for_selector("#run-lost:not([hidden])")
    assert "No answer" in page.inner_text("#run-lost")
    assert float(page.evaluate("getComputedStyle(document.querySelector('[data-part=progress]')).opacity")) < 0.6
    page.unroute("**/ft/{series,run}/**")
    page.wait_for_selector("#run-lost", state="hidden")
    page.wait_for_selector("body:not([data-lost])")
    append(run, Result(step=300, eval_loss=0.5), State(state="finished", exit_code=0))
    page.wait_for_selector(".ft-now >> text=Best step 300")
    assert page.title().startswith("Finished · silent")
    page.click(".ft-now [data-tab=chat]")
    page.wait_for_selector(".ft-tabs [data-tab=chat][aria-current=page]")


def test_every_tab_and_state_is_accessible_and_fits_a_phone(served, visit, require_accessible):
    for state in ("running", "finished", "diverged"):
        filled(served.runs, f"seen-{state}", state)
    names = [("seen-running", tab) for tab in TABS] + [("seen-finished", "overview"), ("seen-diverged", "overview")]
    page = visit("run?run=seen-running", viewport={"width": 1440, "height": 844})
    for name, tab in names:
        page.goto(f"{served.link}run?run={name}&tab={tab}")
        page.wait_for_selector(f".ft-tabs [data-tab={tab}][aria-current=page]")
        page.wait_for_timeout(1000)
        if tab == "overview":
            page.wait_for_selector(".ftc-main [role=img]")
        require_accessible(page, name, tab)


def test_zoom_forced_colours_and_print_leave_nothing_out(served, visit):
    filled(served.runs, "otherwise")
    page = visit("run?run=otherwise", viewport={"width": 640, "height": 450}, device_scale_factor=2)  # 200 % of 1280
    page.wait_for_function("document.querySelector('ft-chart')?.charts?.length")
    assert page.evaluate("document.documentElement.scrollWidth") <= 641
    page.set_viewport_size({"width": 1280, "height": 900})
    page.emulate_media(forced_colors="active")
    outline = "getComputedStyle(document.querySelector('.ft-tabs [data-tab={}]')).outlineStyle"
    assert [page.evaluate(outline.format(tab)) for tab in ("overview", "details")] == ["solid", "none"]
    colours = page.evaluate(
        "[...document.querySelectorAll('.ft-split i')].map((part) => getComputedStyle(part).backgroundColor)"
    )
    assert len(set(colours)) == len(colours) > 3
    page.emulate_media(forced_colors="none", media="print")
    assert page.is_hidden("#ft-rail") and page.locator("#run-head").bounding_box()["x"] < 64


def test_each_state_is_said_in_the_head_and_in_the_tabs_title(served, visit):
    for state in ("running", "failed", "diverged", "lost", "paused", "finished"):
        filled(served.runs, f"is {state}", state)
    make_run(served.runs, "is queued", [])
    page = visit("run?run=is%20queued")
    titles = {
        "queued": "In the queue", "running": "Running", "paused": "Paused", "failed": "Failed", "diverged": "Diverged",
        "lost": "Process lost", "finished": "Finished",
    }  # fmt: skip
    for state, title in titles.items():
        page.goto(f"{served.link}run?run=is%20{state}")
        page.wait_for_selector(f"#run-head [data-state={state}] >> text={title}")
        page.wait_for_function("wanted => document.title.includes(wanted)", arg=f"is {state} · finetune")
        assert page.locator(".ft-failure >> text=Open the log").count() == (state in ("failed", "diverged", "lost"))


def test_a_name_of_110_letters_moves_nothing_off_a_phone(served, visit):
    name = "n" * 110
    filled(served.runs, name)
    page = visit(f"run?run={name}", viewport={"width": 390, "height": 844})
    page.wait_for_selector(f"#run-head h1 >> text={name}")
    for address in ("", "runs", f"run?run={name}&tab=chat"):
        page.goto(f"{served.link}{address}")
        page.wait_for_timeout(1500)
        page.wait_for_selector("h1.ft-title")  # also of a page that its script has filled
        assert page.evaluate("document.documentElement.scrollWidth") <= 391, address


def test_the_page_fills_over_a_slow_line(served, visit):
    filled(served.runs, "slow")
    page = visit("ft/v0/page.js")  # only the cookie
    line = page.context.new_cdp_session(page)
    line.send("Network.enable")
    bytes_per_s = {"downloadThroughput": 1.6e6 / 8, "uploadThroughput": 1.6e6 / 8}
    line.send("Network.emulateNetworkConditions", {"offline": False, "latency": 150, **bytes_per_s})
    page.goto(f"{served.link}run?run=slow")
    page.wait_for_function("document.querySelector('ft-chart')?.charts?.length")
    page.wait_for_timeout(2000)
    assert page.is_hidden("#run-lost")
