"""<ft-chart> in Chromium: values by pointer and keyboard, zoom through live updates, axes, gaps, files, accessibility.

Fails on any console message, any request to another host and any HTTP 5xx. The runs are written by the project's writer.
"""

import math
import random
import re
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


def test_values_are_read_with_the_pointer_and_the_keyboard(served, visit):
    make_run(served[1], "read", [*steps(1, 200, 400), Evaluation(step=150, eval_loss=0.05, eval_s=1.0)])
    page = visit("run?run=read")
    drawn_steps(page, 200)
    first = page.locator("ft-chart .ftc-values").first
    assert "step 200" in re.sub(r"\s+", " ", first.inner_text())
    plot = page.locator("ft-chart .u-over").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 40)  # step 100 of 400
    wait_for(page, "chart.at === 100")
    text = re.sub(r"\s+", " ", first.inner_text())
    assert "step 100" in text and "each step 0.0300" in text
    page.mouse.move(5, 5)
    wait_for(page, "chart.at === null")
    page.focus("ft-chart .ftc-main")
    main = page.locator("ft-chart .ftc-main")
    for key, at in (("Home", 1), ("ArrowRight", 2), ("Shift+ArrowRight", 27), ("ArrowLeft", 26), ("End", 200)):
        page.keyboard.press(key)
        assert chart_of(page, "chart.at") == at == int(main.get_attribute("aria-valuenow"))
    assert "step 200" in main.get_attribute("aria-valuetext") and "held out 0.0500 at 150" in main.get_attribute(
        "aria-valuetext"
    )
    page.keyboard.press("+")
    assert chart_of(page, "chart.zoom") == [100, 300]
    assert page.locator("ft-chart [aria-live]").inner_text() == "Steps 100 to 300"
    page.keyboard.press("-")
    assert chart_of(page, "chart.zoom") is None


def test_a_zoom_stays_over_ten_live_updates_and_the_element_too(served, visit):
    run = make_run(served[1], "live", [Start(resumed_from=None, step=0), *steps(1, 600)], is_alive=True)
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
    for number in range(601, 611):
        append(run, [step(number), *([Evaluation(step=number, eval_loss=0.5, eval_s=1.0)] if number == 605 else [])])
        drawn_steps(page, number)
        assert chart_of(page, "[chart.charts[0].u.scales.x.min, chart.charts[0].u.scales.x.max]") == zoom
    assert page.evaluate("document.querySelector('ft-chart').dataset.mine") == "yes"
    page.wait_for_selector("ft-chart .ftc-values >> text=held out")
    page.click("ft-chart [data-do=whole]")
    assert chart_of(page, "[chart.charts[0].u.scales.x.min, chart.charts[0].u.scales.x.max]") == [0, 1000]


def test_axes_smoothing_and_their_choice_are_kept(served, visit):
    make_run(served[1], "axes", steps(1, 100))
    page = visit("run?run=axes")
    drawn_steps(page, 100)
    scale = "chart.charts[0].u.scales"
    assert chart_of(page, f"[{scale}.y.distr, {scale}.x.max]") == [3, 1000]
    page.click("ft-chart >> text=Linear")
    assert chart_of(page, f"{scale}.y.distr") == 1
    page.click("ft-chart >> text=Time")
    assert chart_of(page, f"{scale}.x.max") == pytest.approx(500)
    page.click("ft-chart >> text=Epoch")
    assert chart_of(page, f"{scale}.x.max") == pytest.approx(2)
    smoothed = chart_of(page, "chart.charts[0].u.data[3].at(-1)")
    page.locator("ft-chart input[type=range]").fill("0")
    assert chart_of(page, "chart.charts[0].u.data[3].at(-1)") == 0.03 != smoothed
    page.reload()
    drawn_steps(page, 100)
    assert chart_of(page, "[chart.view.axis, chart.view.isLog, chart.view.smoothing]") == ["epoch", False, 0]


def test_gaps_retries_and_resumes_are_seen_and_said(served, visit):
    events = [*steps(1, 10), step(11, math.nan), *steps(12, 40),
              Retry(attempt=2, reason="out of memory", changes={}), Start(resumed_from="checkpoint-20", step=20),
              *steps(21, 60), Checkpoint(step=60, path="x", bytes=1, save_s=1.0, seal_s=1.0),
              Evaluation(step=60, eval_loss=0.5, eval_s=1.0), State(state="finished")]  # fmt: skip
    make_run(served[1], "odd", events)
    page = visit("run?run=odd")
    drawn_steps(page, 60)
    label = page.get_attribute("ft-chart .ftc-strip [role=img]", "aria-label")
    for event in ("not a number at step 11", "resume at step 20", "retry at step 40", "best so far at step 60"):
        assert event in label.replace("evaluation, ", "").replace("checkpoint, ", "")
    assert chart_of(page, "chart.charts[0].u.data[1][10]") is None and chart_of(page, "chart.charts[0].u.data[1][11]") == 0.25
    page.focus("ft-chart .ftc-main")
    for key in ("Home", *["ArrowRight"] * 10):
        page.keyboard.press(key)
    assert "each step not a number" in page.get_attribute("ft-chart .ftc-main", "aria-valuetext")


def test_a_run_of_no_step_and_of_one(served, visit):
    run = make_run(served[1], "short", [Start(resumed_from=None, step=0)], 10)
    page = visit("run?run=short")
    page.wait_for_selector("ft-chart .ftc-note >> text=No step is complete yet.")
    append(run, [step(1, total=10)])
    drawn_steps(page, 1)
    page.wait_for_selector("ft-chart .ftc-note", state="hidden")
    assert "step 1" in re.sub(r"\s+", " ", page.locator("ft-chart .ftc-values").first.inner_text())


def test_200_000_steps_are_drawn_and_a_zoom_into_them_has_each(served, visit):
    chance = random.Random(1)
    run = make_run(served[1], "long", [], 200_000)
    with run.events.open("w") as file:
        for number in range(1, 200_001):
            loss = 3 * math.exp(-number / 8e4) + chance.random() / 5
            file.write(f'{{"kind": "step", "step": {number}, "total_steps": 200000, "loss": {loss:.4f}, "step_s": 0.5}}\n')
    page = visit("run?run=long")
    page.set_default_timeout(600_000)  # its history is read for the first time
    wait_for(page, "chart?.charts?.length && chart.runs[0].step === 200000 && !chart.runs[0].read")
    assert chart_of(page, "chart.charts[0].u.data[0].length") <= 400
    page.evaluate("document.querySelector('ft-chart').setZoom(100000, 100200)")
    wait_for(page, "chart.runs[0].zoom?.metrics.loss?.width === 1")
    wait_for(page, "chart.charts[0].u.data[0].filter((x) => x >= 100000 && x <= 100200).length === 201")


def test_several_runs_are_compared_in_one_chart_that_a_diverged_one_does_not_flatten(served, visit):
    for name in ("first run", "second run"):
        make_run(served[1], name, [*steps(1, 50, 100), State(state="finished")])
    make_run(served[1], "diverged", [*(step(n, 500.0, 100) for n in range(1, 51)), State(state="diverged")])
    page = visit("runs")
    for name in ("first run", "second run", "diverged"):
        page.check(f"tr[data-run='{name}'] input")
    page.click("#runs-chosen [data-deed=compare]")
    wait_for(page, "chart?.charts?.length && chart.runs.length === 3 && chart.runs.every((run) => run.step === 50)")
    assert chart_of(page, "chart.panels.map((panel) => panel.title)") == ["Loss, smoothed", "Memory of the process, GiB"]
    assert chart_of(page, "chart.charts[0].u.scales.y.max") < 4
    page.click("ft-chart [data-do=scale]")
    assert chart_of(page, "chart.charts[0].u.scales.y.max") > 500


def test_the_points_are_a_table_a_file_and_a_picture(served, visit, tmp_path):
    make_run(served[1], "files", [*steps(1, 30, 30), State(state="finished")])
    page = visit("run?run=files")
    drawn_steps(page, 30)
    page.route("**/chart_export.js?0", lambda route: route.fulfill(body="throw 0", content_type="text/javascript"))
    page.click("ft-chart [data-do=table]")
    page.wait_for_selector("ft-chart .ftc-note >> text=does not answer")
    assert page.get_attribute("ft-chart [data-do=table]", "aria-pressed") == "false"
    page.click("ft-chart [data-do=table]")
    page.wait_for_selector("ft-chart .ftc-table td")
    assert not page.is_visible("ft-chart .ftc-note >> text=does not answer")
    cells = page.locator("ft-chart .ftc-table td").all_inner_texts()
    assert cells[:2] == ["1", "3.000"] and "30" in cells and "0.100" in cells
    with page.expect_download() as download:
        page.click("ft-chart [data-do=csv]")
    rows = Path(download.value.path()).read_text().splitlines()
    assert rows[0].startswith("run,metric,first_step") and "files,loss,30,30,0.1,0.1,0.1,0" in rows
    with page.expect_download() as download:
        page.click("ft-chart [data-do=png]")
    assert Path(download.value.path()).read_bytes()[1:4] == b"PNG" and download.value.suggested_filename == "files.png"


def test_a_tick_is_one_small_request_and_none_in_a_hidden_tab(served, visit):
    run = make_run(served[1], "counted", [State(state="running"), *steps(1, 500)])
    page = visit("run?run=counted")
    drawn_steps(page, 500)
    sizes = "performance.getEntriesByType('resource').filter((x) => x.name.includes('have=') && !x.name.includes('have=&'))"
    append(run, steps(501, 511))
    drawn_steps(page, 511)
    wait_for(page, f"{sizes}.length")
    assert max(page.evaluate(f"{sizes}.map((x) => x.decodedBodySize)")) < 4096
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    wait_for(page, "!chart.isPolling")
    asked = page.evaluate(f"{sizes}.length")
    append(run, [step(512), step(513)])
    page.wait_for_timeout(2500)
    assert page.evaluate(f"{sizes}.length") == asked and chart_of(page, "chart.runs[0].step") < 513
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: false, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    drawn_steps(page, 513)


def test_a_chart_is_accessible_and_fits_a_phone(served, visit, require_accessible):
    make_run(served[1], "seen", [*steps(1, 300, 600), Evaluation(step=300, eval_loss=0.5, eval_s=1.0)])
    page = visit("run?run=seen", viewport={"width": 1440, "height": 844})
    drawn_steps(page, 300)
    page.click("ft-chart [data-do=table]")
    page.wait_for_selector("ft-chart .ftc-table td", state="attached")
    require_accessible(page)
