"""Layer offloading in the planner: last of all, priced, in words, and within the host's memory. Memory is arithmetic."""

import dataclasses
import json

import psutil
import pytest

from finetune.card import find_card
from finetune.errors import MachineError, RecipeError
from finetune.planner.plan import DataStatistics, Plan
from finetune.planner.planner import make_plan
from finetune.planner.search import least_bytes
from finetune.planner.shape import ModelShape, shape_of
from finetune.planner.speed import Batches, Job, time_step
from finetune.planner.strategy import Strategy
from finetune.recipe import parse_recipe
from finetune.settings.base_formats import NF4
from finetune.settings.compatibility import BUFFERS
from finetune.units import GIB

QWEN_8B, LLAMA_70B = "Qwen/Qwen3-8B", "meta-llama/Llama-3.3-70B-Instruct"
LLAMA = ModelShape(
    family="llama", parameters=70_553_706_496, linear=68_451_041_280, expert=0, head=1_050_673_152, linear_width=10_444_800,
    adapter_per_rank=12_943_360, adapters=560, layers=80, hidden=8192, attention_width=8192, heads=64, table=1_050_673_152,
)  # fmt: skip
JOB = Job(LLAMA, find_card("rtx-4090"), Batches(2048, False, None), batch=16, world=1, rank=16, lean=True)
ALL = Strategy(NF4, True, 1, "adamw_torch_fused", 1, offloaded=80, offload_target="cpu")


@pytest.fixture
def planned(arithmetic, forecast_by):
    def with_offloading(config, settings, card, *, rows, **_):
        """The same with the weights of offloaded layers in pinned memory."""
        forecast = arithmetic(config, settings, card, rows=rows)
        if settings.layer_offloading is False:
            return forecast
        layer = shape_of(config, settings).layer_bytes(settings.base_format)
        gone = max(0, settings.offloaded_layers - BUFFERS) * layer
        names = ("allocated_bytes", "reserved_bytes", "peak_bytes", "peak_low_bytes")
        less = {name: getattr(forecast, name) - gone for name in names}
        less["peak_high_bytes"] = forecast.peak_high_bytes - round(1.1 * gone)
        parts = forecast.parts | {"weights": forecast.parts["weights"] - gone}
        peaks = {phase: size - gone for phase, size in forecast.peaks.items()}
        pinned = settings.offloaded_layers * layer if settings.layer_offloading == "cpu" else 2 * layer
        return dataclasses.replace(forecast, **less, parts=parts, peaks=peaks, pinned_bytes=pinned)

    def make(model, gpu, *overrides, data=None, free_bytes=None, compare=False, card=None):
        recipe = parse_recipe(f"model_name_or_path: {model}\ndataset: data.jsonl\n", overrides=overrides)
        forecast_by(with_offloading)
        return make_plan(recipe, card or find_card(gpu, free_bytes=free_bytes), data, compare=compare)

    return make


def test_offloaded_layers_leave_only_their_buffers_and_move_twice_a_step_at_the_drives_pace():
    """Research notes: 70B in NF4 moves 1,102 GB a step of 16 micro-batches, and 551 GB of 8."""
    for micro, gigabytes in ((1, 1102), (2, 551)):
        copies = time_step(JOB, dataclasses.replace(ALL, micro=micro)).copies
        assert copies.moved_bytes_per_step == 16 // micro * 2 * (80 - BUFFERS) * LLAMA.layer_bytes(NF4)
        assert copies.moved_bytes_per_step / 1e9 == pytest.approx(gigabytes, rel=0.01)
    whole = dataclasses.replace(ALL, offloaded=0, offload_target=False)
    assert least_bytes(whole, JOB) - least_bytes(ALL, JOB) == (80 - BUFFERS) * LLAMA.layer_bytes(NF4)
    drive = dataclasses.replace(JOB, drive_bytes_s=1e9)
    file = dataclasses.replace(ALL, offload_target="nvme")
    assert [time_step(drive, strategy).copies.copied_bytes_per_s for strategy in (file, ALL)] == [1e9, JOB.card.pcie_bytes_s]
    assert time_step(drive, file).step_s > 5 * time_step(drive, ALL).step_s


def test_of_copies_and_arithmetic_the_longer_ones_count_forward_and_backward_apart():
    hidden, resident = time_step(JOB, ALL), time_step(JOB, dataclasses.replace(ALL, offloaded=0, offload_target=False))
    assert hidden.copies.waiting_s == 0 and hidden.step_s == resident.step_s
    slow = dataclasses.replace(JOB, card=dataclasses.replace(JOB.card, pcie_bytes_s=12.6e9))
    one_way = hidden.copies.moved_bytes_per_step / 2 / 12.6e9
    forward = hidden.copies.forward_computing_s
    assert forward < one_way < hidden.copies.backward_computing_s
    assert time_step(slow, ALL).step_s == pytest.approx(resident.step_s + one_way - forward)


def test_a_70b_model_fits_24_gb_with_its_layers_in_host_memory_as_the_plan_says_which_survives_json(planned):
    plan = planned(LLAMA_70B, "rtx-4090", "max_length=2048")
    assert plan.verdict == "fits, slow" and plan.forecast.peak_high_bytes <= plan.budget_bytes
    assert (plan.settings.layer_offloading, plan.settings.offloaded_layers) == ("cpu", 80)
    assert plan.settings.load_in_4bit is True and plan.settings.per_device_train_batch_size > 1
    assert plan.settings.activation_checkpointing is not False
    reason = plan.reasons["layer_offloading"]
    assert "moves" in reason and "a step behind" in reason and "of arithmetic" in reason
    assert any(row.verdict == "does not fit" and "layers offloaded" not in row.plan for row in plan.alternatives)
    copies = plan.layer_copies
    assert (copies.place, copies.layers, copies.of_layers) == ("cpu", 80, 80)
    assert copies.pinned_bytes == 80 * LLAMA.layer_bytes(NF4)
    copying_s = copies.forward_copying_s + copies.backward_copying_s
    assert copies.moved_bytes_per_step / copies.copied_bytes_per_s == pytest.approx(copying_s)
    assert Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan


def test_what_fits_on_the_card_stays_there_and_shorter_rows_come_before_offloading(planned):
    plan = planned(QWEN_8B, "rtx-4090", compare=True)
    assert (plan.settings.layer_offloading, plan.settings.offloaded_layers) == (False, 0)
    assert plan.layer_copies is None and not any("layers offloaded" in row.plan for row in plan.alternatives)
    shorter = planned(QWEN_8B, "rtx-4090", free_bytes=round(7.75 * GIB))
    assert shorter.settings.layer_offloading is False and shorter.settings.max_length < 2048
    long_rows = planned(QWEN_8B, "rtx-4090", "max_length=8192", free_bytes=round(7.75 * GIB))
    assert long_rows.verdict == "fits, slow" and long_rows.settings.layer_offloading == "cpu"


def test_layers_stay_on_the_card_where_that_is_faster(planned):
    """Over a slow link, what the card has room for is not moved."""
    slow = dataclasses.replace(find_card("rtx-4090"), pcie_bytes_s=0.4e9)
    plan = planned(LLAMA_70B, "", "max_length=2048", "per_device_train_batch_size=1", card=slow)
    assert plan.verdict == "fits, slow" and 0 < plan.settings.offloaded_layers < 80
    assert plan.reasons["offloaded_layers"].startswith(f"the other {80 - plan.settings.offloaded_layers} layers fit")


def test_turning_offloading_off_shows_what_it_would_save_and_what_the_recipe_asks_for_is_kept(planned):
    plan = planned(LLAMA_70B, "rtx-4090", "layer_offloading=false", "max_length=2048")
    offered = {row.override: row for row in plan.suggestions}
    assert offered["layer_offloading=cpu"].peak_bytes < plan.budget_bytes < plan.forecast.peak_low_bytes
    plan = planned(QWEN_8B, "rtx-4090", "layer_offloading=nvme", "offloaded_layers=20", "per_device_train_batch_size=2")
    chosen = plan.settings
    assert (plan.verdict, chosen.layer_offloading, chosen.offloaded_layers) == ("fits, very slow", "nvme", 20)
    assert plan.layer_copies.copied_bytes_per_s == 3e9 and "assumes a drive that reads 3.0 GB/s" in plan.forecast.notes[-1]
    with pytest.raises(RecipeError, match="offloaded_layers is 37, the model has 36 decoder layers"):
        planned(QWEN_8B, "rtx-4090", "layer_offloading=cpu", "offloaded_layers=37")


@pytest.mark.parametrize("override", ["layer_offloading=false", "torch_compile=true", "load_in_8bit=true"])
def test_what_excludes_offloading_does_not_fit(planned, override):
    plan, reason = planned(LLAMA_70B, "rtx-4090", override), "as the recipe sets it" if "=false" in override else override[:8]
    assert plan.verdict == "does not fit" and plan.settings.layer_offloading is False
    assert reason in plan.reasons["layer_offloading"]


def test_samples_are_off_by_default_and_their_cost_is_reported(planned):
    plan = planned(LLAMA_70B, "rtx-4090")
    assert plan.settings.sample_answers == 0 and "each token of an answer would copy 32." in plan.reasons["sample_answers"]
    assert planned(LLAMA_70B, "rtx-4090", "sample_answers=2").settings.sample_answers == 2
    assert planned(QWEN_8B, "rtx-4090").settings.sample_answers == 3


@pytest.fixture
def here(monkeypatch):
    """A 4090 in this machine, with so much host memory free."""

    def machine(gib):
        memory = psutil.virtual_memory()._replace(total=64 * GIB, available=gib * GIB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        monkeypatch.setattr("finetune.card.card._cgroup", lambda *_: None)
        return dataclasses.replace(find_card("rtx-4090"), source="measured")

    return machine


def test_a_machine_with_too_little_host_memory_offloads_the_layers_that_it_holds_or_reads_from_a_file(planned, here):
    card = here(6)
    plan = planned(LLAMA_70B, "", "max_length=2048", card=card)
    assert plan.verdict == "fits, very slow" and plan.settings.layer_offloading == "nvme"
    with pytest.raises(MachineError, match="cpu: 80 layers need .* of pinned host memory; .* are available") as error:
        planned(LLAMA_70B, "", "layer_offloading=cpu", "offloaded_layers=80", card=card)
    assert "layer_offloading=nvme" in error.value.fix
    plan = planned(LLAMA_70B, "", "max_length=2048", card=here(30))
    assert plan.settings.layer_offloading == "cpu" and plan.settings.offloaded_layers < 80
    assert plan.layer_copies.weight_bytes < 30 * GIB


@pytest.mark.slow
def test_uneven_rows_that_must_be_kept_fit_with_offloading(planned):
    lengths = (*[200] * 50, 12_000)
    data = DataStatistics(len(lengths), 0, sum(lengths), sum(lengths), lengths)
    assert planned(QWEN_8B, "rtx-4060", "layer_offloading=false", data=data).verdict == "does not fit"
    assert planned(QWEN_8B, "rtx-4060", data=data).settings.layer_offloading == "cpu"
