"""What training does on a card: which one it opens, how much of it, and what it says when it can't."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recorded_card import RESERVED, SEGMENTS, RecordedCard, train

from finetune.card import find_card, measured_context
from finetune.cli.chat import chat_command
from finetune.cli.evaluate import evaluate_run
from finetune.errors import CardError, RecipeError
from finetune.events import ForecastCheck, Phase, RunWarning, Step, read_events
from finetune.files import write_json
from finetune.planner.history import read_history
from finetune.planner.plan import read_plan
from finetune.recipe import load_recipe
from finetune.run import supervise
from finetune.run.card import cards_of, holders_of, kernel_problem, limit_card, open_card, replacement_message
from finetune.run.memory import MemorySampler
from finetune.run.prepare import create_run, prepare
from finetune.run.retry import next_smaller, no_smaller_plan_message, out_of_memory_event
from finetune.run.state import read_state
from finetune.run.supervise import Supervisor, worker_environment
from finetune.run.training import sft_config
from finetune.units import GIB, MIB, format_bytes

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

DESKTOP, OTHER = "GPU-30900000-aaaa-4bbb-8ccc-000000000001", "GPU-30911111-aaaa-4bbb-8ccc-000000000002"
SHORT = [
    "gpu=auto", "max_steps=3", "save_steps=0", "eval_steps=0", "effective_batch_size=2", "per_device_train_batch_size=1",
    "dataset.max_rows=16", "lora_r=4", "lora_alpha=8",
]  # fmt: skip


@pytest.fixture
def make_run(tmp_path):
    """make_run(*overrides) -> a run of the bundled model for the card of the machine that this process is on."""

    def make(*overrides, force=False):
        return create_run(prepare(load_recipe("tiny-cpu", [*SHORT, *overrides, f"output_dir={tmp_path / 'run'}"]), force=force))

    return make


@pytest.fixture
def desktop(machine, make_run):
    """A run of the bundled model for the RTX 4090 of a desktop, and its plan."""
    machine("4090-desktop")
    run = make_run()
    return run, read_plan(run.plan)


@pytest.fixture
def card(tmp_path, monkeypatch):
    """card(plan) -> the plan's card, recorded."""

    def insert(plan, free_bytes=None, **more):
        facts = {"uuid": plan.card.uuid, "total_bytes": plan.card.total_bytes, "free_bytes": free_bytes or plan.card.free_bytes}
        return RecordedCard(tmp_path / "calls.jsonl", **facts, **more).insert(monkeypatch)

    return insert


@pytest.fixture
def own_signals():
    """A supervisor in this process leaves its signals as they were."""
    names = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP")]
    before = {number: signal.getsignal(number) for number in names}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def supervised(run, environment, tmp_path):
    """Run the real supervisor to its end; the environment that its real worker started with."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import json, os, sys\n"
        "if 'finetune.run.worker' in sys.orig_argv:\n"
        f"    open({str(folder / 'environment.json')!r}, 'w').write(json.dumps(dict(os.environ)))\n"
    )
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, "-m", "finetune.run.supervise", str(run.path)]
    process = subprocess.run(command, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, timeout=600)
    return process.returncode, json.loads((folder / "environment.json").read_text())


def test_the_worker_sees_the_planned_card_only_and_a_torch_that_cannot_use_it_ends_the_run_before_loading(
    machine, make_run, tmp_path
):
    environment = machine("two-3090")
    run = make_run()
    assert read_plan(run.plan).card.uuid == OTHER
    code, worker = supervised(run, environment, tmp_path)  # in the worker, torch is what it is: a build for the CPU
    assert (worker["CUDA_VISIBLE_DEVICES"], worker["CUDA_DEVICE_ORDER"]) == (OTHER, "PCI_BUS_ID")
    state = read_state(run)
    assert (code, state.exit_code, state.state) == (3, 3, "failed")
    assert "is a CPU-only build" in state.message and "torch-backend=auto" in state.message
    assert not any(event.kind == "phase" for event in read_events(run.events))


def test_several_ranks_see_the_first_cards_in_cudas_order_and_an_equal_card_is_no_news(machine, make_run, monkeypatch):
    machine("two-3090", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    plan = read_plan(make_run().plan)
    launch = plan.settings.launch.model_copy(update={"num_processes": 2})
    assert cards_of(dataclasses.replace(plan, settings=plan.settings.model_copy(update={"launch": launch}))) == (DESKTOP, OTHER)
    assert replacement_message(plan, cards_of(plan)) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", DESKTOP)
    assert cards_of(plan) == (DESKTOP,) and replacement_message(plan, (DESKTOP,)) == ""


UNSET = dict.fromkeys(("rows", "data", "probe", "pattern", "quantisation"))
SCORES = partial(evaluate_run, **UNSET, score="exact", tolerance=0.0, show="differ", examples=0)
CHAT = partial(chat_command, base=False, both=False, prompt="Hi", system=None, max_new_tokens=1, temperature=0, top_p=1, seed=0)


@pytest.mark.parametrize("command", [SCORES, CHAT])
def test_eval_and_chat_use_the_card_that_the_run_was_planned_for(machine, make_run, command):
    machine("two-3090", CUDA_VISIBLE_DEVICES=f"{DESKTOP},{OTHER}", CUDA_DEVICE_ORDER="FASTEST_FIRST")
    run = make_run("dataset.test_split_size=4")
    with pytest.raises(RecipeError, match="no adapter"):  # but the process has opened no card yet
        command(str(run.path), as_json=True)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == OTHER


def test_a_smaller_card_instead_of_the_planned_one_is_reported(machine, make_run, monkeypatch, own_signals):
    machine("3060-and-4090")
    run = make_run()
    plan = read_plan(run.plan)
    machine("3060-and-4090", CUDA_VISIBLE_DEVICES="GPU-30600000")
    message = "the planned GPU, NVIDIA GeForce RTX 4090 with 23.5 GiB, is missing; the run uses NVIDIA GeForce RTX 3060 with"
    assert replacement_message(plan, cards_of(plan)).startswith(message)
    large = dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, peak_high_bytes=15 * GIB))
    assert replacement_message(large, cards_of(large)).endswith("and may need 15.0 GiB")
    monkeypatch.setattr(supervise, "worker_command", lambda _: [sys.executable, "-S", "-c", "raise SystemExit(1)"])
    assert Supervisor(run).main() == 1
    assert [event.message for event in read_events(run.events) if isinstance(event, RunWarning)] == [
        replacement_message(plan, cards_of(plan))
    ]


def test_a_run_without_a_planned_card_trains_on_one_of_two_with_the_users_allocator_settings(
    machine, make_run, card, monkeypatch
):
    machine("two-3090")
    run = make_run("max_steps=1")
    plan = read_plan(run.plan)
    unknown = dataclasses.replace(plan, card=dataclasses.replace(plan.card, uuid=None))
    assert cards_of(unknown) == cards_of(dataclasses.replace(plan, card=find_card("cpu"))) == ()
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment()
    card(plan)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert sft_config(unknown, run).n_gpu == 1
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    assert worker_environment()["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:512"


def test_training_opens_limits_and_tries_the_card_before_it_loads(desktop, card):
    run, plan = desktop
    recorded = card(plan)
    assert train(run) == 0, run.log.read_text()[-3000:]
    names = [name for name, *_ in recorded.calls()]
    assert names[0] == "open_card" and recorded.calls()[0] == ["open_card", 0]
    order = [names.index(name) for name in ("limit_reserved", "device_of", "release_cached")]
    assert order == sorted(order) and names.count("limit_reserved") == 1
    assert names.count("reset_peak") >= 3  # after loading, and after each step
    assert recorded.limit_bytes() == pytest.approx(plan.budget_bytes - plan.card.context_bytes)
    assert [event.step for event in read_events(run.events) if isinstance(event, Step)] == [1, 2, 3]
    (first, end) = [event for event in read_events(run.events) if isinstance(event, ForecastCheck)]
    assert (first.at, first.step, end.at) == ("first steps", 2, "end")
    assert end.measured_reserved_bytes == RESERVED
    assert end.predicted_reserved_bytes == plan.forecast.reserved_peaks["train"] > plan.forecast.reserved_peaks["load"] > 0
    phases = {event.phase: event for event in read_events(run.events) if isinstance(event, Phase)}
    assert phases.keys() == {"load"}  # with neither evaluations nor checkpoints
    assert all((event.peak_reserved_bytes, event.peak_segments) == (RESERVED, SEGMENTS + 1) for event in phases.values())
    (measured,) = read_history(plan.card.name).errors("reserved")
    assert measured == pytest.approx(RESERVED / end.predicted_reserved_bytes - 1)


def test_an_error_of_the_allocator_is_explained_by_the_plan_and_no_memory_for_a_context_by_who_uses_it(desktop, card):
    _, plan = desktop
    card(plan)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.55 GiB")
    event = out_of_memory_event(error, "evaluate", plan, MemorySampler(on_cuda=True).sample())
    assert (event.message, event.peak_reserved_bytes) == (str(error), RESERVED)
    assert event.forecast_reserved_bytes == plan.forecast.reserved_peaks.get("eval")
    assert event.forecast_allocated_bytes == plan.forecast.peaks["eval"]
    card(plan, broken={"open_card": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")})
    with pytest.raises(CardError, match="no memory left for a CUDA context") as refused:
        open_card(plan, 0)
    assert "(pid 1) 1.07 GiB" in refused.value.fix
    card(plan, broken={"open_card": AssertionError()})
    with pytest.raises(CardError, match="can't be used: AssertionError"):
        open_card(plan, 0)


@pytest.mark.parametrize(("end", "share", "code"), [("peak_low_bytes", 0.9, 5), ("peak_high_bytes", 1.0, 0)])
def test_a_run_with_that_cap_ends_out_of_memory_or_finishes(machine, make_run, card, end, share, code):
    """The card's allocator holds what the forecast expects at least, or at most, and refuses more than its limit."""
    machine("4090-desktop")
    run = make_run("max_steps=1")
    plan = read_plan(run.plan)
    context, unsure = plan.card.context_bytes, plan.card.context_uncertainty_bytes
    needed = getattr(plan.forecast, end) - (context - unsure if end == "peak_low_bytes" else context + unsure)
    budget = round(share * getattr(plan.forecast, end))
    write_json(run.plan, dataclasses.replace(plan, budget_bytes=budget).as_json())

    def reserve(calls):
        limits = [arguments[0] for name, *arguments in calls if name == "limit_reserved"]
        if needed > limits[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    card(plan, broken={"reset_peak": reserve})
    assert train(run) == code, run.log.read_text()[-3000:]
    events = read_events(run.events)
    assert [event.kind for event in events].count("out_of_memory") == (code == 5)


def test_a_card_that_falls_off_the_bus_while_training_is_named_with_the_way_back(desktop, card, tmp_path):
    run, plan = desktop

    def fall(calls):
        if sum(name == "reset_peak" for name, *_ in calls) > 2:
            with (tmp_path / "4090-desktop.machine").open("a") as description:
                description.write("lost_after = 0\n")
            raise RuntimeError("CUDA error: unspecified launch failure")

    card(plan, broken={"reset_peak": fall})
    assert train(run) == 3, run.log.read_text()[-3000:]
    state = read_state(run)
    assert state.message.startswith("NVIDIA GeForce RTX 4090 no longer responds (gpu is lost)")
    assert "dmesg" in state.message and f"finetune resume {run.path}" in state.message
    assert [event.step for event in read_events(run.events) if isinstance(event, Step)] != []


def test_an_error_on_a_card_that_answers_keeps_its_own_words(machine, make_run, card):
    machine("two-3090")
    run = make_run()
    card(read_plan(run.plan), broken={"release_cached": RuntimeError("CUDA error: an illegal memory access")})
    assert train(run) == 1
    assert "illegal memory access" in read_state(run).message


def test_memory_budget_of_the_recipe_is_what_limits(machine, make_run, card):
    machine("4090-desktop")
    plan = read_plan(make_run("memory_budget=3GiB").plan)
    recorded = card(plan)
    assert limit_card(plan) == ""
    assert plan.card.free_bytes > 20 * GIB and recorded.limit_bytes() == pytest.approx(3 * GIB - plan.card.context_bytes)


def test_free_memory_below_the_forecasts_upper_end_is_a_warning_and_under_wsl_the_limit(desktop, card, machine):
    _, plan = desktop
    needed = plan.forecast.peak_high_bytes - plan.card.context_bytes - plan.card.context_uncertainty_bytes
    assert 0 < needed < plan.budget_bytes / 2
    card(plan, free_bytes=needed)
    assert limit_card(plan) == ""
    card(plan, free_bytes=needed - 1)
    assert limit_card(plan).endswith(f"may need {format_bytes(needed)}, the upper end of its forecast")
    recorded = card(plan, free_bytes=32 * MIB)
    assert "NVIDIA GeForce RTX 4090 has 32 MiB free" in limit_card(plan)
    assert recorded.limit_bytes() > 20 * GIB
    machine("wsl")
    limit_card(plan)
    assert recorded.limit_bytes() == pytest.approx(32 * MIB)


def test_the_context_is_learned_once_and_subtracted_once(machine, make_run, card, home):
    others, context = 3000 * MIB, 300 * MIB
    used = f"used_mib = {(others + RESERVED + context) // MIB}"
    machine("h200", used, f"graphics = 1 {others // MIB}", f"compute = self {(RESERVED + context) // MIB}")
    run = make_run()
    recorded = card(read_plan(run.plan))
    for variable in ("before", "after"):
        assert train(run) == 0, run.log.read_text()[-3000:]
        assert measured_context("NVIDIA H200")[0] == context, variable
        shutil.rmtree(run.adapter)
        run.events.unlink()
    shutil.rmtree(run.path)
    machine("h200")
    plan = read_plan(make_run().plan)
    limit_card(plan)
    assert plan.card.context_bytes == context
    assert recorded.limit_bytes() == pytest.approx(plan.card.free_bytes - context, abs=GIB / 100)


@pytest.mark.parametrize("name", ["4090-desktop", "container", "wsl"])
def test_a_process_that_the_driver_does_not_list_makes_others_unknown(machine, card, name):
    machine(name)
    card(SimpleNamespace(card=find_card("auto")))
    memory = MemorySampler(on_cuda=True).sample()
    assert memory.card_used_bytes > 0 and memory.other_processes_bytes is None


def test_out_of_memory_while_loading_names_who_to_close(machine, make_run):
    machine("4090-desktop")
    plan = read_plan(make_run("load_in_4bit=false", "layer_offloading=false").plan)
    assert next_smaller(plan, "load") is None
    message = no_smaller_plan_message(plan, "load", holders_of(cards_of(plan)), Path("recipe.yaml"))
    assert "(pid 1) 1.07 GiB" in message and "load_in_4bit=true or a smaller model" in message


@pytest.fixture
def with_triton(tmp_path, monkeypatch):
    """A package named triton can be imported; its kernels are what the recorded card says."""
    (tmp_path / "packages" / "triton").mkdir(parents=True)
    (tmp_path / "packages" / "triton" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")


def test_without_a_compiler_the_run_is_planned_and_trained_without_triton(machine, make_run, card, with_triton, monkeypatch):
    machine("4090-desktop")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    run = make_run()
    plan = read_plan(run.plan)
    assert any("no C compiler" in note for note in plan.forecast.notes)
    recorded = card(plan)
    assert train(run) == 0, run.log.read_text()[-3000:]
    warnings = [event.message for event in read_events(run.events) if isinstance(event, RunWarning)]
    assert any("no C compiler; the loss is computed without Triton's kernels" in message for message in warnings)
    assert "try_kernel" not in [name for name, *_ in recorded.calls()]


def test_with_a_compiler_a_kernel_is_tried_and_without_one_torch_compile_is_refused(with_triton, desktop, card, monkeypatch):
    _, plan = desktop
    assert plan.forecast.notes == () or not any("Triton" in note for note in plan.forecast.notes)
    recorded = card(plan)
    assert kernel_problem() == "" and [name for name, *_ in recorded.calls()] == ["try_kernel"]
    card(plan, broken={"try_kernel": RuntimeError("cannot find -lcuda")})
    assert "cannot find -lcuda" in kernel_problem()
    monkeypatch.setenv("CC", "/nowhere/gcc")
    with pytest.raises(CardError, match="torch_compile needs Triton: gcc can't be run") as refused:
        prepare(load_recipe("tiny-cpu", ["gpu=auto", "torch_compile=true"]))
    assert refused.value.exit_code == 3 and "torch_compile=false" in refused.value.fix
