"""Rail, Settings and Models: what runs, whose memory is in use, what is wrong with this machine, what runs have made."""

import re

import pytest

from app.page import PAGES
from app.pages import rail
from app.pages.models import models_of, models_table
from app.pages.rail import GpuMemory, RunningJob
from app.pages.settings import examined
from app.web.guard import READ
from finetune.run.directory import RunDirectory
from finetune.units import GIB

GPU = GpuMemory("NVIDIA GeForce RTX 4090", 24 * GIB, 3 * GIB, 20 * GIB)


@pytest.mark.parametrize("address", [address for address, _, _ in PAGES])
def test_the_rail_of_each_page_marks_it_once_and_links_only_to_pages_that_exist(address):
    html = rail.rail(address)
    assert html.count('aria-current="page"') == 1
    links = re.findall(r'href="(/[^"]*)"', html)
    assert all(READ.fullmatch(link) for link in links)
    assert {link.lstrip("/") for link in links} == {address for address, _, _ in PAGES} - {"run"}


def test_memory_in_use_is_the_runs_and_that_of_others():
    html = rail.status(RunningJob("support", 0.61, 960), [GPU])
    assert "this run 20.0 · others 1.0 · free 3.0 GiB" in html
    assert "21.0 of 24.0 GiB" in html and "61%" in html and "16 min left" in html


def test_memory_that_nobody_measured_is_not_said_to_be_the_runs():
    html = rail.status(RunningJob("support", None, None), [GpuMemory(GPU.name, GPU.total_bytes, GPU.free_bytes)])
    assert "in use 21.0 · free 3.0 GiB" in html and "this run" not in html


def test_a_name_of_a_run_is_inert_and_no_gpu_is_said():
    html = rail.status(RunningJob("<b>x</b>", 0.5, None), [])
    assert "<b>x" not in html and "No GPU here" in html


def test_what_is_wrong_with_the_machine_stands_first():
    findings = [{"check": check, "state": state, "what": "<b>", "fix": ""} for check, state in (("a", "ok"), ("b", "fail"))]
    html = examined({"findings": findings, "time_s": 0.0}, is_running=False)
    assert html.index("Failed") < html.index("OK") and "<b>b</b>" in html and "&lt;b&gt;" in html


def test_models_are_adapters_merged_folders_and_gguf_files_with_their_size(tmp_path, kept_run):
    run = RunDirectory(kept_run(tmp_path / "runs"))
    (run.path / "merged").mkdir()
    for name in ("merged/config.json", "merged/model.safetensors", "model.gguf"):
        (run.path / name).write_bytes(b"x" * 100)
    models = list(models_of(run, "tiny"))
    assert [(model.kind, model.bytes) for model in models][1:] == [("merged model", 200), ("GGUF", 100)]
    assert models[0].kind == "adapter" and models[0].bytes > 1000
    assert "runs/finished/model.gguf" in models_table(models, tmp_path)
