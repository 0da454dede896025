"""MLPs over tiles of tokens: the gradients of one tile, and memory that doesn't grow with the row."""

import pytest
import torch
from lean_models import FAMILIES, adapter_gradients, cast, error, fill_adapters, gradients, model_of, tokens
from tiny_training import BASES, adapted, saved_bytes, settings_for
from torch.utils.flop_counter import FlopCounterMode

from finetune.layers import lean_functions
from finetune.layers.checkpointing import decoder_layers
from finetune.layers.lean_functions import NormForm, RmsNorm, in_tiles
from finetune.memory.tracker import StorageTracker
from finetune.model.techniques import apply_techniques

RECOMPUTED = {"lean_layers": True, "activation_checkpointing": True}
#: Does not divide the rows of `tokens()`: 2 x 48.
TILE = 20


def tiled(model, tile=TILE, **more):
    apply_techniques(model, settings_for("none", **RECOMPUTED | more, mlp_tile_tokens=tile))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_tiles_are_those_of_the_whole_row(family):
    model = model_of(family)
    whole, in_parts = gradients(tiled(model, 0), tokens()), gradients(tiled(model), tokens())
    has_mlp = "MLP" in FAMILIES[family][1]
    assert (error(in_parts, whole) > 0) == has_mlp and error(in_parts, whole) <= 1e-6


@pytest.mark.parametrize("more", [{"activation_checkpointing": how} for how in ("offload", "selective")], ids=str)
def test_each_kind_of_checkpointing_gives_the_same_gradients_to_the_bit(more):
    model = model_of("llama")
    assert torch.equal(gradients(tiled(model), tokens()), gradients(tiled(model, **more), tokens()))


def test_gradients_of_a_4_bit_model_are_no_further_from_fp64_than_without_tiles(base):
    model = adapted(settings_for(base, **BASES["nf4"]))
    fill_adapters(model)
    reference, off = cast(model, torch.float64), []
    for seed in range(4):
        exact = gradients(reference, tokens(seed), torch.float64)
        off.append([error(gradients(tiled(model, tile), tokens(seed), torch.bfloat16), exact) for tile in (TILE, 0)])
    assert sum(tile for tile, _ in off) <= 1.05 * sum(whole for _, whole in off)


def test_recomputing_ends_before_a_tiled_mlp_so_that_fewer_products_are_computed():
    flops = {}
    for tile in (0, 64):
        model = tiled(model_of("llama"), tile)
        loss = model(input_ids=tokens(), labels=tokens()).loss
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        flops[tile] = counter.get_total_flops()
    layers = 2
    assert flops[0] - flops[64] == layers * 2 * tokens().numel() * 224 * 64  # those of `down`


def test_evaluation_works_on_tiles_too_and_tiles_of_nothing_are_nothing():
    model = tiled(model_of("llama"))
    with torch.no_grad():
        in_parts = model(input_ids=tokens()).logits
        tiled(model, 0)
        assert 0 <= error(in_parts, model(input_ids=tokens()).logits) <= 1e-6
    assert in_tiles(torch.neg, 4, torch.empty(0, 3)).shape == (0, 3)


def test_layers_that_are_not_recomputed_have_no_tiles(base):
    settings = settings_for(base, **BASES["lora"], lean_layers=True)
    assert saved_bytes(settings.model_copy(update={"mlp_tile_tokens": TILE})) == saved_bytes(settings)
    model = model_of("llama")
    apply_techniques(model, settings_for("none", lean_layers=True, mlp_tile_tokens=TILE))
    whole = gradients(model, tokens())
    apply_techniques(model, settings_for("none", lean_layers=True))
    assert torch.equal(gradients(model, tokens()), whole)


def test_a_norms_backward_over_tiles_gives_the_same_digits(monkeypatch):
    x, weight = torch.randn(2, 33, 64).requires_grad_(), torch.rand(64)
    grads = []
    for elements in (2**24, 7 * 64):
        monkeypatch.setattr(lean_functions, "_FP32_TILE", elements)
        grads += torch.autograd.grad(RmsNorm.apply(x, weight, 1e-6, NormForm(False, False)).square().sum(), x)
    assert torch.equal(*grads)


def test_a_step_does_not_need_the_mlp_of_the_whole_row():
    def most(tile):
        model, tracker = tiled(model_of("llama"), tile), StorageTracker()
        with tracker:
            model(input_ids=tokens(rows=20), labels=tokens(rows=20)).loss.backward()
        assert adapter_gradients(model).isfinite().all()
        return max(peak.total() for peak in tracker.peaks.values())

    inner = 20 * 48 * 224 * 4  # gate or up of the whole batch in fp32
    assert most(0) - most(64) > 3 * inner
    assert decoder_layers(tiled(model_of("llama")))[0].mlp.lean["tile"] == TILE
