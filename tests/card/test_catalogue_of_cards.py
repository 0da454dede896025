"""The catalogue of cards, the CPU as a card, and measurements on this machine."""

import pytest

from finetune.card import catalogue, find_card, measured_context, record_measurement
from finetune.card.find import _name_of_device
from finetune.card.nvidia import Device
from finetune.errors import RecipeError
from finetune.files import cache_dir
from finetune.units import GIB, MIB


def test_an_rtx_4090_has_the_memory_torch_sees_of_which_less_can_be_free_and_the_cpu_is_a_card_of_host_memory():
    card = find_card("rtx-4090")
    assert (card.total_bytes, card.capability) == (round(23.55 * GIB), (8, 9))
    assert (card.bf16_flops, card.bandwidth_bytes_s) == (165.2e12, 1008e9)
    assert card.free_bytes < card.total_bytes and card.supports_bf16 and not card.is_cpu
    assert find_card("rtx-4090", free_bytes=20 * GIB).free_bytes == 20 * GIB
    with pytest.raises(RecipeError, match="30.0 GiB free is not possible: rtx-4090 has 23.5 GiB"):
        find_card("rtx-4090", free_bytes=30 * GIB)
    card = find_card("cpu")
    assert card.is_cpu and card.supports_bf16 and card.context_bytes == 0
    assert 0 < card.free_bytes <= card.total_bytes and card.bf16_flops is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        # case, spaces and the maker's name do not matter
        *((name, "rtx-4090") for name in ("RTX 4090", "rtx4090", "4090", "NVIDIA GeForce RTX 4090", "geforce-rtx-4090")),
        # short names of variants
        ("4090 24GB", "rtx-4090"), ("3060ti", "rtx-3060-ti"), ("4070s", "rtx-4070-super"), ("4090 mobile", "rtx-4090-laptop"),
        ("3080 12gb", "rtx-3080-12gb"), ("A100 80GB", "a100-80gb"),
        # the driver's own names
        ("A100-SXM4-80GB", "a100-80gb"), ("NVIDIA H100 80GB HBM3", "h100-80gb"), ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"), ("Tesla T4", "t4"),
    ],
)  # fmt: skip
def test_a_card_is_found_by_its_names(typed, meant):
    assert find_card(typed).name == meant


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("rtx-4900", "rtx-4090"), ("a100", "a100-80gb"), ("rtx 3069", "rtx-3060"), ("h100", "h100-80gb"),
        *((several, "rtx-3090") for several in ("2x3090", "3090 x2", "2 x RTX 3090", "2x rtx-3090")),
        ("2x3090", "launch.num_processes"), ("RTX 5070 Ti Ultra", "Did you mean rtx-5070-ti"),
        *((unlisted, ", ".join(sorted(catalogue()))) for unlisted in ("potato", "7900xtx", "24GB")),
    ],
)  # fmt: skip
def test_a_name_that_no_card_has_is_answered_with_those_that_were_meant(typed, fix):
    with pytest.raises(RecipeError, match=typed) as error:
        find_card(typed)
    assert fix in error.value.fix and "NVIDIA GPUs with tensor cores" in str(error.value)


def test_every_card_is_whole_with_its_source_and_only_turing_and_volta_lack_bf16():
    cards = catalogue()
    assert len(cards) > 90 and {"rtx-3060", "rtx-4090", "t4", "l4", "a100-80gb", "rtx-5090", "h200", "b200"} <= set(cards)
    for card in cards.values():
        assert 5 * GIB < card.free_bytes <= card.total_bytes <= 180 * GIB
        assert card.bf16_flops and card.bandwidth_bytes_s and card.pcie_bytes_s and card.context_bytes
        assert 0 < card.context_uncertainty_bytes <= card.context_bytes and "memory" in card.reason
    without = {name: card for name, card in catalogue().items() if not card.supports_bf16}
    assert {"t4", "rtx-2080-ti", "v100-16gb"} <= without.keys()
    assert all(card.capability < (8, 0) for card in without.values())
    assert {round(card.bf16_flops / card.fp32_flops) for card in without.values()} == {4, 8}


def test_a_measured_context_takes_the_catalogues_place_unless_it_is_implausible_and_a_damaged_cache_is_none():
    for count in (2 * GIB, 0):
        record_measurement("rtx-4090", count)
        assert measured_context("rtx-4090") is None
    assert measured_context("rtx-4090") is None
    for count in (300 * MIB, 320 * MIB, 310 * MIB):
        record_measurement("NVIDIA GeForce RTX 4090", count)
    card = find_card("rtx-4090")
    assert (card.context_bytes, card.context_uncertainty_bytes) == (310 * MIB, 40 * MIB)
    (cache_dir() / "contexts.json").write_text('{"rtx-4090": "large"')
    assert measured_context("rtx-4090") is None
    record_measurement("rtx-4090", 300 * MIB)
    assert measured_context("rtx-4090") == (300 * MIB, 40 * MIB)


@pytest.mark.parametrize(("total_gib", "entry"), [(7.8, "rtx-4060-ti"), (15.6, "rtx-4060-ti-16gb"), (31.0, None)])
def test_variants_of_one_name_are_distinguished_by_their_memory(total_gib, entry):
    total = round(total_gib * GIB)
    assert _name_of_device(Device("NVIDIA GeForce RTX 4060 Ti", total, total, (8, 9), None, ())) == entry


def test_this_machines_card_agrees_with_the_driver_and_training_on_a_named_card_needs_that_card():
    try:
        card = find_card("auto")
    except RecipeError as error:
        assert "no usable NVIDIA GPU" in str(error) and "--gpu" in error.fix
    else:
        assert card.source == "measured" and 0 < card.free_bytes <= card.total_bytes and card.capability >= (5, 0)
    with pytest.raises(RecipeError, match="this recipe is for an RTX 2070; this machine has") as error:
        find_card("rtx-2070", here=True)
    assert "--gpu rtx-" in error.value.fix or "gpu=auto" in error.value.fix
    assert find_card("cpu", here=True).is_cpu


@pytest.mark.gpu
def test_total_memory_is_what_torch_sees():
    import torch

    assert abs(find_card("auto").total_bytes - torch.cuda.get_device_properties(0).total_memory) < 64 * MIB
