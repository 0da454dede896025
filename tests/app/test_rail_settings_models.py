"""Rail, Settings and Models: what runs, whose memory is in use, what is wrong with this machine, what runs have made."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.page import PAGES, SettingsPage
from app.pages.runs import ModelsPage, models_of
from app.views.markup import render
from app.web.guard import READ
from finetune.files import write_json
from finetune.run.directory import RunDirectory
from finetune.units import GIB

GPU = SimpleNamespace(name="NVIDIA GeForce RTX 4090", total_bytes=24 * GIB, free_bytes=3 * GIB, uuid="GPU-1")


def live_run(name, step, left_s=None, own_bytes=None):
    """What the rail reads of a run of 100 steps."""
    newest, pace = SimpleNamespace(own_card_bytes=own_bytes), SimpleNamespace(left_s=left_s)
    digest, plan = SimpleNamespace(step=step, newest_step=newest, pace=pace), SimpleNamespace(card=GPU)
    return SimpleNamespace(run=SimpleNamespace(path=Path(name)), digest=digest, total_steps=100, plan=lambda: plan)


@pytest.mark.parametrize("address", [address for address, _, _ in PAGES])
def test_the_rail_of_each_page_marks_it_once_and_links_only_to_pages_that_exist(address):
    html = render("rail", address=address)
    assert html.count('aria-current="page"') == 1
    links = re.findall(r'href="(/[^"]*)"', html)
    assert all(READ.fullmatch(link) for link in links)
    assert {link.lstrip("/") for link in links} == {address for address, _, _ in PAGES} - {"run"}


def test_memory_in_use_is_the_runs_and_that_of_others_and_what_nobody_measured_is_not_said_to_be_the_runs():
    html = render("rail_status", live=live_run("support", 61, 960, 20 * GIB), gpus=[GPU])
    assert "this run 20.0 · others 1.0 · free 3.0 GiB" in html
    assert "21.0 of 24.0 GiB" in html and "61%" in html and "16 min left" in html
    html = render("rail_status", live=live_run("support", 0), gpus=[GPU])
    assert "in use 21.0 · free 3.0 GiB" in html and "this run" not in html and "starting" in html


def test_a_name_of_a_run_is_inert_and_no_gpu_is_said():
    html = render("rail_status", live=live_run("<b>x<b>", 50), gpus=[])
    assert "<b>x" not in html and "No GPU here" in html


def test_what_is_wrong_with_the_machine_stands_first(context):
    findings = [{"check": check, "state": state, "what": "<b>", "fix": ""} for check, state in (("a", "ok"), ("b", "fail"))]
    folder = context.workspace.folder("doctor")
    write_json(folder / "status.json", {"state": "done", "began_s": 0.0})
    (folder / "output.txt").write_text(json.dumps({"findings": findings}) + "\n")
    html = SettingsPage(context).parts()["machine"]
    assert html.index("Failed") < html.index("OK") and "<b>b</b>" in html and "&lt;b&gt;" in html


def test_models_are_adapters_merged_folders_and_gguf_files_with_their_size(context, kept_run):
    run = RunDirectory(kept_run(context.workspace.runs))
    (run.path / "merged").mkdir()
    for name in ("merged/config.json", "merged/model.safetensors", "model.gguf"):
        (run.path / name).write_bytes(b"x" * 100)
    models = [(model["kind"], model["size"]) for model in models_of(context.lives.of(run))]
    assert models[1:] == [("merged model", "200 B"), ("GGUF", "100 B")]
    assert models[0][0] == "adapter" and models[0][1].endswith("iB")
    assert "runs/finished/model.gguf" in ModelsPage(context).parts()["list"]
