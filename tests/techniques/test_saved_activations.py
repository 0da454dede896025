"""Hooks that offload saved activations: exact, without weights, and each storage once."""

import weakref

import pytest
import tiny_training
import torch
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

from finetune.layers.offload import WINDOW, InOrder, Offload, SavedActivations

#: The logits of tiny_training's batch in fp32.
LOGITS_BYTES = batch(0)["input_ids"].numel() * VOCABULARY * 4


def at_once(window: int = WINDOW) -> Offload:
    return Offload(InOrder(), pinned=False, window=window)


class Seen(SavedActivations):
    """Records which tensors the hooks replaced and which not."""

    def __init__(self, offload):
        self.left, self.taken = [], []
        super().__init__(offload)

    def _pack(self, tensor):
        packed = super()._pack(tensor)
        (self.left if isinstance(packed, torch.Tensor) else self.taken).append(tensor)
        return packed


@pytest.fixture
def offloaded(monkeypatch):
    """offloaded(window) -> every saved activation is offloaded from here on."""

    def offload_all(window=WINDOW):
        monkeypatch.setattr(tiny_training, "step_context", lambda settings, device: SavedActivations(at_once(window)))

    return offload_all


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [False, True])
def test_offloading_gives_the_same_losses_to_the_bit(base, kind, recompute, offloaded):
    expected = plain_losses(base, kind)
    offloaded()
    assert losses(settings_for(base, **BASES[kind], activation_checkpointing=recompute)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", BASES)
def test_fewer_bytes_are_saved(base, kind, offloaded):
    (plain,) = forecast_saved_bytes(base, kind, {})
    offloaded()
    (moving,) = forecast_saved_bytes(base, kind, {})
    offloaded(window=0)
    (moved,) = forecast_saved_bytes(base, kind, {})
    assert moved < 0.10 * plain
    assert moved <= moving <= moved + WINDOW * LOGITS_BYTES  # the largest tensor that is moved


@pytest.mark.parametrize("form", [{}, RECOMPUTED["full"], RECOMPUTED["every-2"]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_saves_the_bytes_of_its_forecast(base, form, dtype):
    eager = {"dtype": dtype, "attn_implementation": "eager"}  # sdpa skips its mask depending on data
    assert forecast_saved_bytes(base, "lora", form, **eager) == [saved_bytes(settings_for(base, **form, **eager))]


def test_neither_weights_nor_their_casts_nor_integers_are_touched(base):
    model = adapted(settings_for(base, **BASES["nf4"]))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {tuple(parameter.shape) for parameter in trained(model)}
    with Seen(at_once()) as seen, autocast(settings_for(base, **BASES["nf4"])):
        model(**batch(0)).loss.backward()
    assert seen.taken
    for tensor in seen.taken:
        assert tensor.is_floating_point()
        assert tensor.untyped_storage().data_ptr() not in weights
        assert tuple(tensor.shape) not in shapes and tuple(tensor.shape[::-1]) not in shapes
    assert any(tensor.untyped_storage().data_ptr() in weights for tensor in seen.left)


def test_a_tensor_saved_by_several_operations_is_stored_once():
    x = torch.randn(8, 64, 128, requires_grad=True) * 1
    with SavedActivations(at_once()) as hooks:
        handles = [hooks._pack(view) for view in (x, x.view(4, 128, 128), x.transpose(0, 1), x)]
    assert len({id(handle.moved) for handle in handles}) == 1
    for handle, view in zip(handles, (x, x.view(4, 128, 128), x.transpose(0, 1), x), strict=True):
        assert torch.equal(hooks._unpack(handle), view)


def test_a_tensor_changed_in_place_is_stored_again():
    x = torch.randn(4, 32, 128, requires_grad=True) * 1
    with SavedActivations(at_once()) as hooks:
        before = hooks._pack(x)
        old = x.detach().clone()
        x.add_(1)
        after = hooks._pack(x)
    assert torch.equal(hooks._unpack(before), old)
    assert torch.equal(hooks._unpack(after), x)


def test_a_freed_storage_is_not_mistaken_for_a_new_one_at_its_address():
    with SavedActivations(at_once()) as hooks:
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

    with SavedActivations(Offload(Watched(), pinned=False)) as hooks:
        x = torch.randn(64, 64, 128, requires_grad=True)
        (x * 1).sin().sum().backward()
        assert all(stored() is None for _, stored in hooks._stored.values())
    assert not hooks._stored and targets and all(target() is None for target in targets)
