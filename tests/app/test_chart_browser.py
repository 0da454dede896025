"""<ft-chart> in Chromium: values under the pointer, a zoom through live updates, gaps, comparison, table, file and picture.

Fails on any console message, any request to another host and any HTTP 5xx. The runs are written by the project's writer.
"""

import math
import random
from pathlib import Path

import pytest
from written_runs import append, make_run, step, steps

from finetune.events import Checkpoint, Evaluation, Retry, Start, State

pytestmark = [pytest.mark.browser, pytest.mark.npm, pytest.mark.slow, pytest.mark.timeout(2400)]


def chart_of(page, expression):
    """A value of the chart's state."""
    return page.evaluate(f"(() => {{ const chart = document.querySelector('ft-chart'); return {expression}; }})()")


def wait_for(page, expression):
    page.wait_for_function(f"(() => {{ const chart = document.querySelector('ft-chart'); return {expression}; }})()")


def drawn_steps(page, number):
    wait_for(page, f"chart?.charts?.length && chart.runs[0].step === {number}")


def legend(page, plot=0):
    """The readings above a plot."""
    rows = page.locator("ft-chart .u-legend").nth(plot).locator("tr:visible").all()
    return " ".join(": ".join(row.locator("th, td").all_inner_texts()) for row in rows)


def test_values_are_those_under_the_pointer_else_the_newest_and_a_log_scale_and_smoothing_are_kept(served, visit):
    make_run(served.runs, "read", [*steps(1, 200, 400), Evaluation(step=150, eval_loss=0.05, eval_s=1.0)])
    page = visit("run?run=read")
    drawn_steps(page, 200)
    newest = "step: 200 each step: 0.0150 smoothed: 0.0153 held out: 0.0500"
    assert legend(page) == newest
    assert "this process: 11.50" in legend(page, 1) and "forecast: 12.00 (11.00 to 13.00)" in legend(page, 1)
    plot = page.locator("ft-chart .u-over").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 40)  # step 100 of 400
    wait_for(page, "chart.charts[0].u.cursor.idx === 100 && chart.charts[1].u.cursor.idx === 100")
    assert legend(page).startswith("step: 100 each step: 0.0300")
    page.mouse.move(5, 5)
    wait_for(page, "chart.charts[0].u.cursor.idx === null")
    assert legend(page) == newest
    scale, last = "chart.charts[0].u.scales.y.distr", "chart.charts[0].u.data[3].findLast((value) => value !== undefined)"
    assert chart_of(page, scale) == 1
    page.check("ft-chart [data-view=isLog]")
    assert chart_of(page, scale) == 3
    smoothed = chart_of(page, last)
    page.locator("ft-chart input[type=range]").fill("0")
    assert chart_of(page, last) == 0.015 != smoothed
    page.reload()
    drawn_steps(page, 200)
    assert chart_of(page, f"[chart.view.isLog, chart.view.smoothing, {scale}]") == [True, 0, 3]


def test_without_uplot_there_is_a_table_and_how_to_get_the_curves(served, visit):
    make_run(served.runs, "plain", steps(1, 40))
    page = visit("runs")
    page.route("**/uplot.js", lambda route: route.fulfill(body="", content_type="text/javascript"))
    page.goto(f"{served.link}run?run=plain")
    page.wait_for_selector("ft-chart td >> text=40")
    assert "build again with npm" in page.inner_text("ft-chart .ftc-note")
    assert page.locator("ft-chart button:visible").all_inner_texts() == ["CSV"]


def test_a_zoom_stays_over_ten_live_updates_and_the_element_too(served, visit):
    run = make_run(served.runs, "live", [Start(resumed_from=None, step=0), *steps(1, 600)], is_alive=True)
    page = visit("run?run=live")
    drawn_steps(page, 600)
    page.evaluate("document.querySelector('ft-chart').dataset.mine = 'yes'")
    box = page.locator("ft-chart .u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 40, steps=5)
    page.mouse.up()
    wait_for(page, "chart.zoom && chart.zoom[0] > 190 && chart.zoom[1] < 410")
    zoom = chart_of(page, "chart.zoom")
    scales = "chart.charts.map(({u}) => [u.scales.x.min, u.scales.x.max])"
    for number in range(601, 611):
        append(run, step(number), *([Evaluation(step=number, eval_loss=0.5, eval_s=1.0)] if number == 605 else []))
        drawn_steps(page, number)
        assert chart_of(page, scales) == [zoom, zoom]
    assert page.evaluate("document.querySelector('ft-chart').dataset.mine") == "yes"
    page.wait_for_selector("ft-chart .u-legend >> text=held out")
    page.click("ft-chart [data-do=whole]")
    assert chart_of(page, scales) == [[0, 1000], [0, 1000]]


def test_gaps_retries_and_resumes_are_seen_and_said(served, visit):
    events = [*steps(1, 10), step(11, math.nan), *steps(12, 40),
              Retry(attempt=2, reason="out of memory", changes={}), Start(resumed_from="checkpoint-20", step=20),
              *steps(21, 60), Checkpoint(step=60, path="x", bytes=1, save_s=1.0, seal_s=1.0),
              Evaluation(step=60, eval_loss=0.5, eval_s=1.0), State(state="finished")]  # fmt: skip
    make_run(served.runs, "odd", events)
    page = visit("run?run=odd")
    drawn_steps(page, 60)
    happened = "not a number at step 11 · resume at step 20 · retry at step 40 · checkpoint at step 60 · evaluation at step 60"
    assert page.inner_text("ft-chart .ftc-marks") == happened
    assert chart_of(page, "[11, 12].map((place) => chart.charts[0].u.data[1][place])") == [None, 0.25]


def test_a_run_of_no_step_and_of_one(served, visit):
    run = make_run(served.runs, "short", [Start(resumed_from=None, step=0)], 10)
    page = visit("run?run=short")
    page.wait_for_selector("ft-chart .ftc-note >> text=No step yet.")
    append(run, step(1, total=10))
    drawn_steps(page, 1)
    page.wait_for_selector("ft-chart .ftc-note", state="hidden")
    assert legend(page).startswith("step: 1 each step: 3.000")


def test_200_000_steps_are_drawn_with_their_lowest_and_highest_values(served, visit):
    chance = random.Random(1)
    run = make_run(served.runs, "long", [], 200_000)
    with run.events.open("w") as file:
        for number in range(1, 200_001):
            loss = 9.0 if number == 123_456 else 3 * math.exp(-number / 8e4) + chance.random() / 5
            file.write(f'{{"kind": "step", "step": {number}, "total_steps": 200000, "loss": {loss:.4f}, "step_s": 0.5}}\n')
    page = visit("run?run=long")
    page.set_default_timeout(600_000)  # its history is read for the first time
    wait_for(page, "chart?.charts?.length && chart.runs[0].step === 200000 && chart.runs[0].read === null")
    assert chart_of(page, "chart.charts[0].u.data[0].length") <= 1002
    assert chart_of(page, "Math.max(...chart.charts[0].u.data[1].filter(Number.isFinite))") == 9


def test_several_runs_are_compared_and_one_that_flattens_the_others_is_hidden_by_a_click(served, visit):
    for name in ("first run", "second run"):
        make_run(served.runs, name, [*steps(1, 50, 100), State(state="finished")])
    make_run(served.runs, "diverged", [*(step(n, 500.0, 100) for n in range(1, 51)), State(state="diverged")])
    page = visit("runs")
    for name in ("first run", "second run", "diverged"):
        page.check(f"tr[data-run='{name}'] input")
    page.click("#runs-chosen [data-deed=compare]")
    wait_for(page, "chart?.charts?.length && chart.runs.length === 3 && chart.runs.every((run) => run.step === 50)")
    assert chart_of(page, "chart.panels.map((panel) => panel.title)") == ["Loss, smoothed", "Memory of the process, GiB"]
    assert chart_of(page, "chart.charts[0].u.scales.y.max") > 500
    page.locator("ft-chart .u-legend").first.locator("th", has_text="diverged").click()
    wait_for(page, "chart.charts[0].u.scales.y.max < 4")


def test_the_points_are_a_table_a_file_and_a_picture(served, visit):
    make_run(served.runs, "files", [*steps(1, 30, 30), State(state="finished")])
    page = visit("run?run=files", permissions=["clipboard-read", "clipboard-write"])
    drawn_steps(page, 30)
    page.click("ft-chart [data-do=table]")
    cells = page.locator("ft-chart .ftc-table td").all_inner_texts()
    assert cells[:2] == ["1", "3.000"] and "30" in cells and "0.100" in cells
    with page.expect_download() as download:
        page.click("ft-chart [data-do=csv]")
    rows = Path(download.value.path()).read_text().splitlines()
    assert rows[0].startswith("run,metric,first_step") and "files,loss,30,30,0.1,0.1,0.1,0" in rows
    page.click("ft-chart [data-do=copy]")
    page.wait_for_selector("ft-chart [data-do=copy] >> text=Copied")
    assert page.evaluate("navigator.clipboard.read().then(([item]) => item.types)") == ["image/png"]
    page.evaluate("void (navigator.clipboard.write = () => Promise.reject())")
    with page.expect_download() as download:
        page.click("ft-chart [data-do=copy]")
    assert Path(download.value.path()).read_bytes()[1:4] == b"PNG" and download.value.suggested_filename == "files.png"


def test_a_tick_is_one_small_request_and_none_in_a_hidden_tab(served, visit):
    run = make_run(served.runs, "counted", [State(state="running"), *steps(1, 500)])
    page = visit("run?run=counted")
    drawn_steps(page, 500)
    sizes = "performance.getEntriesByType('resource').filter((x) => /have=.*-/.test(x.name))"
    append(run, *steps(501, 511))
    drawn_steps(page, 511)
    wait_for(page, f"{sizes}.length")
    assert max(page.evaluate(f"{sizes}.map((x) => x.decodedBodySize)")) < 4096
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    wait_for(page, "!chart.isPolling")
    asked = page.evaluate(f"{sizes}.length")
    append(run, step(512), step(513))
    page.wait_for_timeout(2500)
    assert page.evaluate(f"{sizes}.length") == asked and chart_of(page, "chart.runs[0].step") < 513
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: false, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    drawn_steps(page, 513)


def test_a_chart_is_accessible_and_fits_a_phone(served, visit, require_accessible):
    make_run(served.runs, "seen", [*steps(1, 300, 600), Evaluation(step=300, eval_loss=0.5, eval_s=1.0)])
    page = visit("run?run=seen", viewport={"width": 1440, "height": 844})
    drawn_steps(page, 300)
    page.click("ft-chart [data-do=table]")
    page.wait_for_selector("ft-chart .ftc-table td", state="attached")
    require_accessible(page)
