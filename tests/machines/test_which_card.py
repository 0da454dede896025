"""Which card of a machine is planned, with how much memory, and in which words."""

import subprocess
import sys

import pytest

from finetune.card import find_card, nvidia
from finetune.card.visible import visible
from finetune.distributed import machine_problems
from finetune.errors import RecipeError
from finetune.recipe import parse_recipe
from finetune.units import MIB

pytestmark = pytest.mark.compiler

ON_DESKTOP, OTHER = "GPU-30900000-aaaa-4bbb-8ccc-000000000001", "GPU-30911111-aaaa-4bbb-8ccc-000000000002"


def test_a_desktop_is_not_free_a_t4_has_float16_over_pcie_3_and_an_older_driver_and_unknown_bytes_are_said(machine):
    machine("4090-desktop")
    card = find_card("auto")
    assert card.total_bytes == (24564 - 452) * MIB and card.free_bytes == card.total_bytes - 1612 * MIB
    assert card.bf16_flops == find_card("rtx-4090").bf16_flops and card.context_bytes == find_card("rtx-4090").context_bytes
    machine("t4")
    card = find_card("auto")
    assert not card.supports_bf16 and card.pcie_bytes_s == pytest.approx(12.6e9, rel=0.01)
    assert card.bandwidth_bytes_s == 320e9
    machine("t4", "driver = 570.86.16", "cuda = 12080", cuda="12.9")
    assert find_card("auto", here=True).problem == ""
    machine("wsl")
    assert "(bytes unknown)" in find_card("auto").reason and "0 B" not in find_card("auto").reason


def test_the_card_with_more_free_memory_is_taken_no_hidden_one_and_of_several_for_one_run_the_least_counts(machine):
    machine("two-3090")
    card = find_card("auto")
    assert (card.uuid, card.free_bytes) == (OTHER, (24576 - 300 - 12) * MIB)
    assert "GPU 1, chosen from 2 (gpu=0 is NVIDIA GeForce RTX 3090 with 21.9 GiB free)" in card.reason
    machine("3060-and-4090", "used_mib = 20000")
    assert find_card("auto").name == "NVIDIA GeForce RTX 3060"
    machine("two-3090", CUDA_VISIBLE_DEVICES=ON_DESKTOP)
    assert find_card("auto").uuid == ON_DESKTOP and "set by CUDA_VISIBLE_DEVICES" in find_card("auto").reason
    machine("two-3090", "card = Tesla T4", "total_mib = 15360", "capability = 7.5", "uuid = GPU-74000000", "pci = 0:61:0")
    card = find_card("auto", processes=2)  # of the first two
    assert (card.uuid, card.free_bytes) == (ON_DESKTOP, (24576 - 300 - 1800) * MIB)
    assert "GPU 0 has the least free memory of the run's 2 GPUs" in card.reason
    assert find_card("auto", processes=3).name == "Tesla T4"


@pytest.mark.parametrize(
    ("setting", "uuids"),
    [
        ("0", [ON_DESKTOP]),
        ("1, 0", [OTHER, ON_DESKTOP]),
        ("1,7,0", [OTHER]),
        ("0,-1,1", [ON_DESKTOP]),
        ("", []),
        ("-1", []),
        ("GPU-30900000", [ON_DESKTOP]),
        (OTHER, [OTHER]),
        ("GPU-309", []),  # begins both
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_chooses_by_index_in_nvidia_smi_or_by_uuid(machine, setting, uuids):
    machine("two-3090", CUDA_VISIBLE_DEVICES=setting)
    assert [device.uuid for device in visible(nvidia.read_devices()[0])] == uuids


@pytest.mark.slow
@pytest.mark.parametrize("setting", [OTHER, None])
def test_a_process_that_plans_hides_every_card_from_cuda_alone(machine, setting):
    code = (
        "import os; from finetune.card import find_card, visible; visible.hide_gpus(); visible.hide_gpus();"
        "print(os.environ['CUDA_VISIBLE_DEVICES'], find_card('auto').uuid,"
        " visible.environment_with_gpus().get('CUDA_VISIBLE_DEVICES'))"
    )
    environment = machine("two-3090", **({"CUDA_VISIBLE_DEVICES": setting} if setting else {}))
    planning = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert planning.stdout.split() == ["-1", OTHER, str(setting)]


def test_a_card_is_named_by_its_index_in_nvidia_smi_its_uuid_or_its_name(machine):
    machine("two-3090")
    for gpu, uuid in (("0", ON_DESKTOP), ("1", OTHER), (OTHER, OTHER), ("gpu-30900000", ON_DESKTOP)):
        assert find_card(gpu).uuid == find_card(gpu, here=True).uuid == uuid
    machine("3060-and-4090")
    assert find_card("rtx-3060", here=True).name == "NVIDIA GeForce RTX 3060"
    with pytest.raises(RecipeError, match=r"for an RTX 5090; this machine has 0 \(NVIDIA GeForce RTX 3060, 11.8 GiB\), 1"):
        find_card("rtx-5090", here=True)


def test_more_processes_than_cards_are_a_problem(machine):
    recipe = parse_recipe("{model_name_or_path: tiny, dataset: a.jsonl, launch: {num_processes: 2}}")
    machine("two-3090")
    assert machine_problems(recipe, on_cpu=False) == []
    machine("two-3090", CUDA_VISIBLE_DEVICES="0,3")
    (problem,) = machine_problems(recipe, on_cpu=False)
    assert "needs 2 GPUs on this machine; 1 can be used" in problem
    assert machine_problems(recipe, on_cpu=True) == []


def test_torch_without_cuda_is_reported_by_the_plan_and_refused_by_a_run(machine):
    machine("4090-desktop", cuda=None)
    assert "CPU-only build" in find_card("auto").problem
    with pytest.raises(RecipeError, match="gpu: rtx-4090, but torch .* is a CPU-only build"):
        find_card("rtx-4090", here=True)


@pytest.mark.parametrize(
    ("name", "more", "shown", "gpu", "problem", "fix"),
    [
        ("two-3090", [], "", "auto", r"0 \(NVIDIA GeForce RTX 3090, 23.7 GiB, hidden by .*\), 1", "gpu=cpu"),
        ("two-3090", [], None, "2", r"gpu: 2, but this machine has 0 \(NVIDIA GeForce RTX 3090", "gpu=auto"),
        ("two-3090", [], OTHER, "0", r"has 0 \(.*, hidden by CUDA_VISIBLE_DEVICES='GPU-3091", "gpu=auto"),
        ("lost-card", [], None, "0", r"this machine has 1 \(.*\), 0, which can't be used \(gpu is lost\)", "gpu=auto"),
        (
            "t4", ["mig = 1"], None, "auto", r"has 0, which can't be used \(split by MIG, which is not supported\)",
            "sudo nvidia-smi -i 0 -mig 0",
        ),
        ("t4", ["lost_after = 3"], None, "auto", r"has 0, which can't be used \(gpu is lost\)", "Restart the machine"),
        ("t4", ["start = 18"], None, "auto", "version mismatch", "restart the machine"),
    ],
)  # fmt: skip
def test_a_card_that_cannot_be_used_is_an_error_that_says_why(machine, name, more, shown, gpu, problem, fix):
    machine(name, *more, **({} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}))
    with pytest.raises(RecipeError, match=problem) as error:
        find_card(gpu)
    assert fix in error.value.fix
