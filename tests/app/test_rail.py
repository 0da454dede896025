"""Rail: what runs, whose memory is in use, what is wrong with this machine."""

import json
import re
from types import SimpleNamespace

import pytest

from app.page import Rail
from app.views.markup import render
from app.web.guard import READ
from finetune.files import write_json
from finetune.units import GIB

GPU = SimpleNamespace(name="NVIDIA GeForce RTX 4090", total_bytes=24 * GIB, free_bytes=3 * GIB, uuid="GPU-1")


def live_run(name, step, left_s=None, own_bytes=None):
    """What the rail reads of a run of 100 steps."""
    newest, pace, path = SimpleNamespace(own_card_bytes=own_bytes), SimpleNamespace(left_s=left_s), SimpleNamespace(name=name)
    digest, plan = SimpleNamespace(step=step, newest_step=newest, pace=pace), SimpleNamespace(card=GPU)
    return SimpleNamespace(run=SimpleNamespace(path=path), digest=digest, total_steps=100, plan=lambda: plan)


@pytest.mark.parametrize(
    "address, tab, marked",
    [("", None, "/"), ("run", "use", "/runs"), ("run", "chat", "/run?tab=chat&amp;run=a%20b"), ("runs", None, "/runs")],
)
def test_the_rail_of_each_page_marks_its_place_and_links_only_to_pages_that_exist(address, tab, marked):
    links = re.findall(r'href="(/[^"]*)"(.*)', render("rail", address=address, tab=tab, run="a b"))
    assert [link for link, more in links if "aria-current" in more] == [marked]
    assert all(READ.fullmatch(link.partition("?")[0]) for link, _ in links)


def test_memory_in_use_is_the_runs_and_that_of_others_and_what_nobody_measured_is_not_said_to_be_the_runs():
    html = render("rail_status", live=live_run("support", 61, 960, 20 * GIB), gpus=[GPU])
    assert "this run 20.0 · others 1.0 · free 3.0 GiB" in html
    assert "21.0 of 24.0 GiB" in html and "61%" in html and "16 min left" in html
    html = render("rail_status", live=live_run("<b>x<b>", 0), gpus=[GPU])
    assert "in use 21.0 · free 3.0 GiB" in html and "this run" not in html and "starting" in html and "<b>x" not in html
    assert "No GPU here" in render("rail_status", live=None, gpus=[])


def test_what_is_wrong_with_the_machine_stands_first(context):
    findings = [{"check": state, "state": state, "what": "<b>", "fix": ""} for state in ("ok", "fail")]
    folder = context.workspace.folder("doctor")
    write_json(folder / "status.json", {"state": "done", "began_s": 0.0})
    (folder / "output.txt").write_text(json.dumps({"findings": findings}) + "\n")
    html = Rail(context).parts()["machine"]
    assert html.index("Failed") < html.index("OK") and "<b>fail</b>" in html and "&lt;b&gt;" in html
