"""The data of <ft-chart>: parts that add up to the whole, and answers to hostile parameters."""

import json
import random
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from written_runs import append, plan, step_event

from app.live import LiveRun, LiveRuns
from app.pages.run import RunPage
from app.views.charts import chart_data
from app.views.runs import peak_beside_forecast
from app.web.followed import explain_errors
from app.workspace import Workspace
from finetune.events import Checkpoint, Evaluation, Retry, Start, Step
from finetune.files import write_json
from finetune.run.directory import RunDirectory
from finetune.units import GIB


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "runs" / "one")
    run.path.mkdir(parents=True)
    write_json(run.plan, plan(3000).as_json())
    return run


@pytest.fixture
def live(run):
    return LiveRun(run)


@pytest.fixture
def get(run, tmp_path):
    api = FastAPI()
    explain_errors(api)
    RunPage(SimpleNamespace(workspace=Workspace(tmp_path, tmp_path / "runs"), lives=LiveRuns())).add_routes(api)

    def request(name="one", **query):
        address = f"/ft/{'run' if query else 'series'}/{quote(name)}".replace(".", "%2e")
        response = TestClient(api).get(address, params=query)
        return response.status_code, response.text

    return request


def losses(first, last, total=3000):
    chance = random.Random(first)
    return [step_event(step, total, chance) for step in range(first, last + 1)]


class Client:
    """Keeps bins as chart.js does."""

    def __init__(self, live):
        self.live, self.have, self.series, self.marks = live, "", {}, []

    def tick(self):
        news = chart_data(self.live, self.have)
        if not news["from"]:
            self.series = {}
        self.marks = news["marks"]
        for name, part in news["series"].items():
            bins = self.series.setdefault(name, {"width": part["width"]})
            if bins["width"] != part["width"]:
                self.have = ""
                return self.tick()
            bins.update({index: values for index, *values in part["bins"]})
        self.have = news["have"]
        return news


def test_what_is_sent_in_parts_is_what_is_sent_at_once(run, live):
    client = Client(live)
    for first in range(1, 900, 37):
        append(run, *losses(first, first + 36), Evaluation(step=first, eval_loss=1.0, eval_s=1.0))
        client.tick()
    append(run, Retry(attempt=2, reason="out of memory", changes={}), Start(resumed_from="checkpoint-800", step=800))
    client.tick()
    append(run, *losses(801, 1000), Step(step=1001, total_steps=3000, loss=float("nan")))
    append(run, Checkpoint(step=800, path="x", bytes=1, save_s=1.0, seal_s=1.0))  # sealed later
    client.tick()
    at_once = Client(live)
    at_once.tick()
    assert client.series == at_once.series and sorted(client.marks) == sorted(at_once.marks)
    assert all([name, step] in client.marks for name, step in (("retry", 925), ("resume", 800), ("save", 800)))
    assert [bins[3] for index, bins in client.series["loss"].items() if index != "width" and len(bins) > 3] == [1]


def test_a_tick_sends_only_the_bins_of_new_steps_and_an_unknown_key_is_answered_with_everything(run, live):
    client = Client(live)
    append(run, *losses(1, 2000))
    live.refresh()
    first = client.tick()
    assert first["series"]["loss"]["width"] == 4
    append(run, *losses(2001, 2003))
    news = client.tick()
    assert len(news["series"]["loss"]["bins"]) == 1 and len(json.dumps(news)) < 0.05 * len(json.dumps(first))
    newest = client.have
    assert chart_data(live, newest)["from"] == 2003
    for have in ("x", "\0", newest[1:], f"{newest}x", "00000000-0.50"):
        assert chart_data(live, have)["from"] == 0
    append(run, Start(resumed_from="checkpoint-20", step=20), *losses(21, 22))
    assert chart_data(live, newest)["from"] == 0
    run.events.unlink()
    append(run, *losses(1, 3))
    news = chart_data(live, newest)
    assert (news["from"], news["step"], len(news["series"]["loss"]["bins"])) == (0, 3, 3)


def test_a_run_without_steps_has_panels_and_only_the_line_of_the_process_is_of_the_forecasts_kind(live, run):
    news = chart_data(live)
    assert (news["step"], news["series"]) == (0, {})
    assert [panel["title"] for panel in news["panels"]] == ["Loss", "GPU memory, GiB"]
    memory = {"reserved_bytes": 7 * GIB, "card_used_bytes": 9 * GIB, "other_processes_bytes": GIB}
    append(run, Step(step=1, loss=1.0, peak_allocated_bytes=6 * GIB, peak_reserved_bytes=8 * GIB, **memory))
    news = chart_data(live)
    panel = news["panels"][1]
    newest = {line["kind"]: news["series"][line["name"]]["bins"][-1][1] + line["add"] for line in panel["lines"]}
    assert newest == {"process": 9.0, "allocated": 6.0, "whole": 9.0}
    assert [line["label"] for line in panel["lines"]] == ["this process", "allocated", "whole GPU, with other programs"]
    assert [level["value"] for level in panel["levels"] if level["kind"] == "forecast"] == [12.0]
    assert peak_beside_forecast(live) == "9.0 / 12.0"


def test_an_answer_is_strict_json_of_bounded_size_and_what_is_wrong_is_refused_in_a_sentence(get, run):
    append(run, *losses(1, 800), Checkpoint(step=800, path="x", bytes=1, save_s=1.0, seal_s=1.0))
    append(run, Step(step=801, total_steps=3000, loss=float("inf")))
    status, text = get()
    assert status == 200 and len(text) < 200_000
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert "messages" in json.loads(get(tab="details")[1])["parts"]
    for wrong in ({"tab": "none"}, {"order": "<script>"}):
        status, text = get(**{"tab": "details"} | wrong)
        assert status == 400 and text.endswith("."), wrong
    for name in ("nothing", "..", ".app", "x" * 200, "\u00e9" * 200, "a\x00b"):
        assert get(name) == (404, "There is no such run."), name
    run.plan.write_text("{")
    status, text = get()
    assert status == 409 and "one/plan.json can't be read" in text
