"""Every machine through doctor, plan, page and the start of a run: the right card, the right budget, the right words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_card import RecordedCard, train

from app.planning import Questions
from app.views.new_run import blocker_of
from app.worker import Work
from finetune.card import find_card, record_measurement
from finetune.card.visible import usable_devices
from finetune.cli import main
from finetune.doctor.machine import check_cards, check_driver, check_spill
from finetune.events import ForecastCheck, Phase, Step, newest, read_events
from finetune.planner.plan import Choices, Plan, read_plan
from finetune.planner.resources import choose_budget
from finetune.recipe import load_recipe, parse_recipe, write_recipe
from finetune.run.card import cards_of, limit_card
from finetune.run.prepare import create_run, prepare
from finetune.run.state import read_state
from finetune.run.supervise import worker_environment
from finetune.units import GIB, MIB

pytestmark = pytest.mark.compiler
HERE = Path(__file__).parent
RECIPE = parse_recipe("{model_name_or_path: tiny, dataset: rows.jsonl}")
#: Machine -> UUID of the card to train on, what is free on it (total less reserve less what all others hold), and words of the
#: doctor's lines on its cards.
TRAINS = {
    "4090-desktop": ("GPU-40900000", 24564 - 452 - 1612, ["22.0 GiB of 23.5 GiB free"]),
    "two-3090": ("GPU-30911111", 24576 - 300 - 12, ["0: NVIDIA GeForce RTX 3090: 21.9", "1: NVIDIA GeForce RTX 3090: 23.7"]),
    "3060-and-4090": ("GPU-40900000", 24564 - 452 - 100, ["RTX 3060: 11.7 GiB", "RTX 4090: 23.4 GiB"]),
    "t4": ("GPU-74000000", 15360 - 443, ["Tesla T4: 14.6 GiB of 14.6 GiB free"]),
    "h200": ("GPU-20000000", 143771 - 616, ["NVIDIA H200: 139.8 GiB of 139.8 GiB free"]),
    "container": ("GPU-40900000", 24564 - 452 - 9000, ["8.79 GiB in use by programs that can't be named in a container"]),
    "wsl": ("GPU-40700000", 12282 - 230 - 1400, ["10.4 GiB of 11.8 GiB free"]),
    "lost-card": ("GPU-30900000", 24576 - 300, ["RTX 3090: 23.7 GiB", "GPU 0 can't be used (gpu is lost)"]),
}  # fmt: skip
#: Machine -> words of the error with which plan and run end, and of its fix.
REFUSED = {
    "old-driver": ("driver 470.256.02 supports CUDA up to 11.4", "Update the driver to 580"),
    "gtx-1080-ti": ("compute capability 6.1, but CUDA 13.0 of torch", "cu126"),
}
ONE_STEP = [
    "gpu=auto", "max_steps=1", "save_steps=0", "eval_steps=0", "effective_batch_size=1", "per_device_train_batch_size=1",
    "dataset.max_rows=8", "lora_r=4", "lora_alpha=8", "max_length=256",
]  # fmt: skip


def test_no_machine_is_left_out():
    assert {*TRAINS, *REFUSED} == {path.stem for path in HERE.glob("*.machine")}


@pytest.mark.parametrize("name", TRAINS)
def test_the_doctor_names_driver_and_cards_and_the_budget_is_what_is_free_on_the_planned_one(machine, name):
    machine(name)
    uuid, free_mib, message = TRAINS[name]
    lines = [finding.what for finding in check_cards()]
    assert [text for text, line in zip(message, lines, strict=True) if text not in line] == []
    assert check_driver().state == "ok" and (check_spill().state == "warn") == (name == "wsl")
    card = find_card("auto")
    assert card.uuid.startswith(uuid) and card.supports_bf16 == (name != "t4")
    assert 0 <= free_mib * MIB - choose_budget(Choices(RECIPE), card)[1] < GIB // 100 + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["4090-desktop", "two-3090", "container", "wsl"])
def test_the_planned_card_is_the_one_that_trains_within_its_budget(machine, name, tmp_path, monkeypatch):
    machine(name)
    run = create_run(prepare(load_recipe("tiny-cpu", [*ONE_STEP, f"output_dir={tmp_path / 'run'}"])))
    plan = read_plan(run.plan)
    assert plan.card.uuid.startswith(TRAINS[name][0]) and plan.exit_code == 0
    environment = worker_environment(cards_of(plan))
    assert environment["CUDA_VISIBLE_DEVICES"] == plan.card.uuid
    assert ("PYTORCH_ALLOC_CONF" in environment) == (name != "wsl")
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):  # as the supervisor starts it
        monkeypatch.setenv(variable, environment[variable])
    facts = {"uuid": plan.card.uuid, "total_bytes": plan.card.total_bytes, "free_bytes": plan.card.free_bytes}
    recorded = RecordedCard(tmp_path / "calls.jsonl", **facts).insert(monkeypatch)
    assert limit_card(plan) == ""
    assert train(run) == 0, run.log.read_text()[-3000:]
    assert recorded.limit_bytes() == pytest.approx(plan.budget_bytes - plan.card.context_bytes)
    assert read_state(run).state == "finished"
    samples = [event for event in read_events(run.events) if isinstance(event, (Phase, Step))]
    assert {sample.card_total_bytes for sample in samples} == {plan.card.total_bytes}
    if name in ("container", "wsl"):  # process ids there mean nothing here
        assert {sample.other_processes_bytes for sample in samples} == {None}
        check = newest(ForecastCheck, read_events(run.events))
        assert check.measured_context_bytes is check.measured_other_processes_bytes is None
        assert check.measured_card_used_bytes > plan.card.total_bytes - plan.card.free_bytes - MIB


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_on_a_card_that_cannot_be_used_ends_with_exit_3_and_the_fix(machine, name, monkeypatch, capsys, home):
    machine(name)
    problem, fix = REFUSED[name]
    monkeypatch.setattr(sys, "argv", ["finetune", "run", "tiny-cpu", "gpu=auto"])
    assert main() == 3
    shown = capsys.readouterr()
    output = " ".join((shown.out + shown.err).split())
    assert output.startswith("The GPU can't be used") and problem in output and fix in output
    assert not (home / "runs").exists()


def test_the_context_is_part_of_the_need_and_not_taken_from_the_budget_as_well(machine):
    machine("4090-desktop")
    before = choose_budget(Choices(RECIPE), find_card("auto"))[1]
    record_measurement("NVIDIA GeForce RTX 4090", 400 * MIB)
    card = find_card("auto")
    assert card.context_bytes == 400 * MIB and choose_budget(Choices(RECIPE), card)[1] == before


def test_the_page_offers_each_card_of_the_machine_and_none_without_a_driver(machine):
    machine("two-3090")
    name = "NVIDIA GeForce RTX 3090"
    assert [(device.index, device.name) for device in usable_devices()] == [("0", name), ("1", name)]
    machine("t4", "start = 9")
    assert usable_devices() == ()


@pytest.mark.slow
def test_command_line_and_page_plan_the_same_card_and_say_that_torch_cannot_use_it(machine, capsys, monkeypatch):
    machine("two-3090", cuda=None)
    recipe = load_recipe("tiny-cpu", ["gpu=auto", "dtype=auto"])
    monkeypatch.setattr(sys, "argv", ["finetune", "plan", "tiny-cpu", "gpu=auto", "dtype=auto", "--json"])
    assert main() == 3
    printed = json.loads(capsys.readouterr().out)
    page = Questions().plan(Work(), write_recipe(recipe), has_data=True)
    assert printed["card"] == page["card"] and printed["card"]["uuid"].startswith("GPU-30911111")
    blocker = blocker_of(recipe, Plan.from_json(page), Path.cwd())
    assert "CPU-only build" in printed["card"]["problem"]
    assert "CPU-only build" in blocker.problems[0] and "Install the wheel" in blocker.fix


def test_the_doctor_reports_a_silent_driver_a_card_in_use_one_off_the_bus_and_a_hidden_one(machine):
    machine("t4", "start = 9")
    assert check_driver().state in ("warn", "fail") and "Driver Not Loaded" in check_driver().what
    machine("t4", "start = 18")  # updated under the machine
    assert check_driver().state == "fail" and check_driver().fix == "Restart the machine."
    machine("t4", "used_mib = 9000", "compute = self 8999")
    (finding,) = check_cards()
    assert finding.state == "warn" and "python" in finding.what and "8.79 GiB" in finding.what
    assert "5.78 GiB of 14.6 GiB free" in finding.what
    machine("lost-card")
    working, failed = check_cards()
    assert (working.state, failed.state) == ("ok", "fail")
    assert "GPU 0 can't be used (gpu is lost)" in failed.what and "dmesg" in failed.fix
    machine("two-3090", CUDA_VISIBLE_DEVICES="GPU-30911111")
    desktop, other = check_cards()
    assert (desktop.state, other.state) == ("skip", "ok") and "hidden by CUDA_VISIBLE_DEVICES" in desktop.what


@pytest.mark.slow
def test_a_process_of_its_own_finds_the_driver_by_the_librarys_name(machine):
    command = [sys.executable, "-m", "finetune", "doctor", "--json"]
    process = subprocess.run(command, env=machine("4090-desktop"), capture_output=True, text=True)
    findings = {finding["check"]: finding for finding in json.loads(process.stdout)["findings"]}
    assert "RTX 4090" in findings["card memory"]["what"] and findings["driver"]["what"].startswith("580.95.05")
