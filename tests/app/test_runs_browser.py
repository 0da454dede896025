"""The pages that list runs, in Chromium: search, filters, choosing, renaming, deleting; Home.

Fails on any console message, any request to another host and any HTTP 5xx.
"""

import json

import pytest
from browser import english_texts
from written_runs import append, make_run, make_sweep, step, steps

from app.language import catalogue
from finetune.events import Evaluation, Result, State
from finetune.run.directory import RunDirectory

pytestmark = [pytest.mark.browser, pytest.mark.npm, pytest.mark.slow, pytest.mark.timeout(2400)]

NAMES = ("delta", "charlie", "bravo", "alpha")  # the newest is first in the table


@pytest.fixture(scope="module", autouse=True)
def written(served):
    for name in reversed(NAMES):
        make_run(served.runs, name, [*steps(1, 40), Evaluation(step=40, eval_loss=0.5, eval_s=1.0)])
    append_end(served, "alpha", "finished")
    for name in ("bravo", "charlie"):
        append_end(served, name, "failed")


def append_end(served, name, state):
    append(RunDirectory(served.runs / name), Result(step=40, eval_loss=0.5), State(state=state, exit_code=0))


def listed(page):
    return page.locator(".ft-runs tr[data-run]:not([hidden]) .c-name").all_inner_texts()


def test_runs_are_searched_chosen_renamed_and_deleted_while_they_go_on(served, visit):
    page = visit("runs")
    page.wait_for_selector("tr[data-run=alpha]")
    page.fill("#runs-search", "LPH")
    assert listed(page) == ["alpha"]
    page.fill("#runs-search", "")
    page.select_option("#runs-state", "Failed")
    assert sorted(listed(page)) == ["bravo", "charlie"]
    page.select_option("#runs-state", "")

    first, last = listed(page)[0], listed(page)[2]
    page.check(f"tr[data-run={first}] input")
    page.click(f"tr[data-run={last}] input", modifiers=["Shift"])
    assert "3 chosen" in page.inner_text("#runs-chosen")
    page.focus("tr[data-run=delta] a")
    append(RunDirectory(served.runs / "delta"), step(41))
    page.wait_for_selector("tr[data-run=delta] >> text=41 of")  # what was chosen, and the focus, stay
    assert page.locator(".ft-runs tr.chosen").count() == 3 and page.evaluate("document.activeElement.innerText") == "delta"
    page.click("#runs-chosen [data-deed=none]")

    page.once("dialog", lambda dialog: dialog.accept("renamed"))
    page.click("tr[data-run=alpha] .ft-more")
    page.click("#runs-menu [data-deed=rename]")
    page.wait_for_selector("tr[data-run=renamed]")

    page.click("tr[data-run=renamed] .ft-more")
    page.click("#runs-menu [data-deed=delete]")
    page.wait_for_selector("[data-said] >> text=To restore it, move")
    page.wait_for_selector("tr[data-run=renamed]", state="detached")


def test_names_of_110_letters_move_nothing_off_a_phone_in_a_comparison_or_a_sweep(served, visit):
    names = ["c" * 110, "m" * 110]
    for name in names:
        run = make_run(served.runs, name, steps(1, 40))
        run.adapter.mkdir()
        (run.adapter / "adapter_model.safetensors").write_bytes(b"0" * 100)
    make_sweep(served.runs, "s" * 110)
    page = visit("runs")
    for name in names:
        page.check(f"tr[data-run={name}] input")
    page.click("#runs-chosen [data-deed=compare]")
    page.wait_for_function("document.querySelector('#runs-compared ft-chart')?.charts?.length")
    for address, ready in {"": "#runs-compared", f"run?run={'s' * 110}": "#run-arms td"}.items():
        if address:
            page.goto(f"{served.link}{address}")
        page.wait_for_selector(ready)
        for width in (390, 320):
            page.set_viewport_size({"width": width, "height": 844})
            page.wait_for_timeout(1000)
            assert page.evaluate("document.documentElement.scrollWidth") <= width + 1, (address, width)


def test_a_sweep_is_in_chinese_where_the_browser_is(served, visit):
    make_sweep(served.runs, "rates")
    page = visit("run?run=rates", locale="zh-CN")
    page.wait_for_function("document.querySelector('#run-body ft-chart')?.charts?.length")
    page.wait_for_selector("#run-arms td")
    assert set(english_texts(page)) & catalogue("zh").keys() == set()


def test_a_file_that_is_dropped_on_the_page_is_the_data_of_a_new_run(served, visit):
    page = visit("")
    page.wait_for_selector(".nr-sentence")
    rows = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    page.evaluate(
        """(rows) => { const files = new DataTransfer(); files.items.add(new File([rows], "tickets.jsonl"));
        document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: files, bubbles: true })); }""",
        rows,
    )
    page.wait_for_selector(".nr-blank:has-text('tickets')")
    page.wait_for_selector("#nr-panel[open] >> text=First rows")
