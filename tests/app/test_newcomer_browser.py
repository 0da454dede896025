"""A newcomer's walk in Chromium, in an empty folder: with so many clicks a file becomes a model that chats and is exported.

Fails on any console message, any request to another host and any HTTP 5xx.
"""

import csv
import json

import pytest
from browser import served_app

from finetune.bundled import dataset_paths
from finetune.run.directory import list_runs

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def served(tmp_path_factory, forecasts, warm_python):
    yield from served_app(tmp_path_factory.mktemp("workspace"), forecasts, warm_python)


#: Counts the clicks of a person, of all pages of a tab.
COUNT = "addEventListener('click', (event) => { sessionStorage.n = Number(sessionStorage.n ?? 0) + event.isTrusted; }, true)"


def test_a_file_with_its_own_columns_becomes_a_model_in_six_clicks_that_chats_and_is_exported(served, visit, tmp_path):
    with (tmp_path / "tickets.csv").open("w", newline="", encoding="utf-8") as file:
        rows = [json.loads(line)["messages"] for line in dataset_paths("support")["train"].read_text().splitlines()[:60]]
        texts = ([f"T-{n}", *(message["content"] for message in row[:2])] for n, row in enumerate(rows))
        csv.writer(file).writerows([["ticket", "customer_message", "our_reply"], *texts])
    page = visit("")
    page.evaluate(COUNT)
    page.click("[data-panel=model]")
    page.click("[data-key=tiny]")
    page.click("[data-panel=data]")
    with page.expect_file_chooser() as chooser:
        page.click("[data-upload]")
    chooser.value.set_files(tmp_path / "tickets.csv")
    page.wait_for_selector("#nr-panel >> text=54 rows to train on, 6 held out")
    roles = page.locator("select[data-column]").evaluate_all("all => all.map(({ value }) => value)")
    assert roles == ["ignore", "instruction", "output"]
    page.click("[data-close]")
    page.wait_for_selector(".nr-verdict.ok")
    page.fill("#nr-name", "tickets")
    page.click("#nr-start:enabled")
    page.wait_for_url("**/run?run=tickets")
    assert page.evaluate("sessionStorage.n") == "6"
    (run,) = list_runs(served.folder / "runs")

    page.wait_for_selector("#run-head >> text=/Step \\d+ of/")
    page.wait_for_selector(".ft-now >> text=held-out loss")
    page.click(".ft-now [data-tab=chat]")
    page.fill("#chat-question", "Route this message: my tent is torn")
    page.click("#chat-send")
    page.wait_for_selector("#chat-turns .ft-turn.tuned")
    page.wait_for_selector("#chat-turns [aria-busy=false]")
    assert "no answer" not in page.inner_text("#chat-turns")

    page.click(".ft-tabs [data-tab=use]")
    page.click("#result-merge")
    page.wait_for_selector("#result-merge-shown td >> text=merged")
    assert (run.path / "merged" / "model.safetensors").stat().st_size > 10**6
    assert json.loads((run.path / "merged" / "config.json").read_text())["model_type"]
    page.click(".ft-tabs [data-tab=answers]")
    page.click("#result-report")
    with page.expect_download() as download:
        page.click("#result-report-shown >> text=Download the report")
    assert download.value.suggested_filename == f"{run.path.name}-report.html"


def test_the_demo_is_one_click(served, visit):
    page = visit("")
    page.click("#new-run button:has-text('demo')")
    page.wait_for_url("**/run?run=*")
    page.wait_for_selector("#run-head [data-state=running]")
    page.click("[data-key=act-pause]")
    page.wait_for_selector("#run-head [data-state=paused]")
