"""Hooks on saved activations: offloading is exact, int8 is close; both skip weights and store each storage once."""

import weakref

import pytest
import torch
from lean_models import adapter_gradients, fill_adapters
from tiny_training import (
    BASES,
    KINDS,
    RECOMPUTED,
    VOCABULARY,
    adapted,
    autocast,
    batch,
    forecast_saved_bytes,
    losses,
    plain_losses,
    saved_bytes,
    settings_for,
    trained,
)

from finetune.layers.offload import WINDOW, InOrder, Offload
from finetune.layers.saved_activations import BLOCK, SavedActivations, dequantise, is_compressible, quantise
from finetune.model.techniques import step_context

#: The logits of tiny_training's batch in fp32.
LOGITS_BYTES = batch(0)["input_ids"].numel() * VOCABULARY * 4


def at_once(window: int = WINDOW) -> Offload:
    return Offload(InOrder(), pinned=False, window=window)


class Seen(SavedActivations):
    """Records which tensors the hooks replaced and which not."""

    def __init__(self, **arguments):
        self.left, self.taken = [], []
        super().__init__(**arguments)

    def _pack(self, tensor):
        packed = super()._pack(tensor)
        (self.left if isinstance(packed, torch.Tensor) else self.taken).append(tensor)
        return packed


def gradients(settings) -> torch.Tensor:
    model = adapted(settings)
    fill_adapters(model)
    with step_context(settings, "cpu"), autocast(settings):
        model(**batch(0)).loss.backward()
    return adapter_gradients(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [False, True])
def test_offloading_gives_the_same_losses_to_the_bit(base, kind, recompute):
    settings = settings_for(base, **BASES[kind], activation_checkpointing=recompute, activation_offloading=True)
    assert losses(settings) == plain_losses(base, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_int8_gradients_point_the_same_way(base, kind):
    plain, rounded = (
        gradients(settings_for(base, **BASES[kind])),
        gradients(settings_for(base, **BASES[kind], int8_activations=True)),
    )
    assert torch.nn.functional.cosine_similarity(plain, rounded, dim=0) > 0.9995
    assert rounded.norm() / plain.norm() == pytest.approx(1, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BASES)
def test_fewer_bytes_are_saved(base, kind, monkeypatch):
    int8, offload = {"int8_activations": True}, {"activation_offloading": True}
    plain, rounded, moving, both_moving = forecast_saved_bytes(base, kind, {}, int8, offload, int8 | offload)
    assert rounded < 0.65 * plain
    monkeypatch.setattr("finetune.model.techniques.offload_beside", lambda device: at_once(window=0))
    moved, both = forecast_saved_bytes(base, kind, offload, int8 | offload)
    assert both <= moved < 0.10 * plain
    in_flight = WINDOW * LOGITS_BYTES  # the largest tensor that is moved
    assert moved <= moving <= moved + in_flight and both <= both_moving <= both + in_flight


@pytest.mark.parametrize("form", [{}, RECOMPUTED["full"], RECOMPUTED["every-2"], {"int8_activations": True}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_saves_the_bytes_of_its_forecast(base, form, dtype):
    eager = {"dtype": dtype, "attn_implementation": "eager"}  # sdpa skips its mask depending on data
    assert forecast_saved_bytes(base, "lora", form, **eager) == [saved_bytes(settings_for(base, **form, **eager))]


def test_neither_weights_nor_their_casts_nor_integers_are_touched(base):
    model = adapted(settings_for(base, **BASES["nf4"]))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {tuple(parameter.shape) for parameter in trained(model)}
    for arguments in ({"int8": True}, {"offload": at_once()}):
        with Seen(**arguments) as seen, autocast(settings_for(base, **BASES["nf4"])):
            model(**batch(0)).loss.backward()
        assert seen.taken
        for tensor in seen.taken:
            assert tensor.is_floating_point()
            assert tensor.untyped_storage().data_ptr() not in weights
            assert tuple(tensor.shape) not in shapes and tuple(tensor.shape[::-1]) not in shapes
        assert any(tensor.untyped_storage().data_ptr() in weights for tensor in seen.left)


def test_int8_leaves_masks_and_softmax_statistics_exact(base):
    settings = settings_for(base, **BASES["nf4"])
    inputs = batch(0) | {"attention_mask": torch.ones(2, 64, dtype=torch.long).tril()}
    with Seen(int8=True) as seen, autocast(settings):
        adapted(settings)(**inputs).loss.backward()
    exact_shapes = {tuple(tensor.shape) for tensor in seen.left}
    assert {(2, 1, 64, 64), (2, 4, 64), (2, 64, 1)} <= exact_shapes  # mask, log-sum-exp of attention, variance of a norm


def test_a_tensor_saved_by_several_operations_is_stored_once():
    x = torch.randn(8, 64, 128, requires_grad=True) * 1
    with SavedActivations(int8=True) as hooks:
        handles = [hooks._pack(view) for view in (x, x.view(4, 128, 128), x.transpose(0, 1), x)]
    assert len({id(handle.stored) for handle in handles}) == 1
    for handle, view in zip(handles, (x, x.view(4, 128, 128), x.transpose(0, 1), x), strict=True):
        assert torch.allclose(hooks._unpack(handle), view, atol=x.abs().max().item() / 200)


def test_a_tensor_changed_in_place_is_stored_again():
    x = torch.randn(4, 32, 128, requires_grad=True) * 1
    with SavedActivations(offload=at_once()) as hooks:
        before = hooks._pack(x)
        old = x.detach().clone()
        x.add_(1)
        after = hooks._pack(x)
    assert torch.equal(hooks._unpack(before), old)
    assert torch.equal(hooks._unpack(after), x)


def test_a_freed_storage_is_not_mistaken_for_a_new_one_at_its_address():
    with SavedActivations(offload=at_once()) as hooks:
        pairs = []
        for value in range(50):
            x = torch.full((64, 128), float(value), requires_grad=True) * 1
            pairs.append((value, hooks._pack(x)))
            del x
        assert all((hooks._unpack(handle) == value).all() for value, handle in pairs)


def test_nothing_stays_allocated_on_the_device_or_the_host_after_the_backward():
    targets = []

    class Watched(InOrder):
        def copy(self, target, source):
            targets.append(weakref.ref(target))
            super().copy(target, source)

    with SavedActivations(offload=Offload(Watched(), pinned=False), int8=True) as hooks:
        x = torch.randn(64, 64, 128, requires_grad=True)
        (x * 1).sin().sum().backward()
        assert all(stored() is None for _, stored in hooks._stored.values())
    assert not hooks._stored and targets and all(target() is None for target in targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, 5 * BLOCK + 7])
def test_the_error_is_at_most_one_part_in_254_of_the_block(dtype, count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    error = (dequantise(quantise(values)).float() - values.float()).abs()
    padded = torch.nn.functional.pad(values.float().abs(), (0, -count % BLOCK)).view(-1, BLOCK)
    limit = padded.amax(1).repeat_interleave(BLOCK)[:count] / 254
    assert (error <= limit * 1.001 + values.float().abs() * torch.finfo(dtype).eps).all()


def test_blocks_of_zeros_and_infinities_are_restored_without_nan():
    values = torch.zeros(3 * BLOCK)
    values[BLOCK + 1], values[2 * BLOCK] = 5.0, float("-inf")
    back = dequantise(quantise(values))
    assert (back[:BLOCK] == 0).all()
    assert back[BLOCK + 1] == pytest.approx(5.0)
    assert back[2 * BLOCK] < -1e38 and not back.isnan().any()


def test_small_exact_and_per_token_tensors_are_not_compressible():
    big = torch.randn(4, 64, 128, requires_grad=True) * 1
    assert is_compressible(big)
    assert not is_compressible(big.detach())
    assert not is_compressible(big[:, :1, :8] * 1)
    assert not is_compressible((big * 1).mean(-1, keepdim=True).expand(4, 64, 16) * 1)
    assert not is_compressible(torch.zeros(64, 128, dtype=torch.int64))
