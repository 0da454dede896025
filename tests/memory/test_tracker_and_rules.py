"""The tracker's bytes and kernel workspaces by hand, and CUDA's code paths on CPU tensors."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.functional import quantize_4bit
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from finetune.compat.torch import backward
from finetune.memory.caching_allocator import MIN_BLOCK, rounded
from finetune.memory.fake_tensors import card_semantics
from finetune.memory.rules import cublas_workspace_bytes, rules_for, uses_flash
from finetune.memory.tracker import StorageTracker
from finetune.units import MIB

AMPERE, TURING = (8, 6), (7, 5)
WIDTHS, ROWS = (64, 128, 32), 16


def peak_of(work, capability=AMPERE, phase="backward"):
    tracker = StorageTracker(rules_for(capability))
    with card_semantics(5), FakeTensorMode(), tracker:
        values = work(tracker)
    del values
    return tracker.peaks[(phase, None)]


def test_cublas_workspaces_and_which_attention_kernel():
    assert cublas_workspace_bytes(TURING) == cublas_workspace_bytes(AMPERE) == 8_519_680
    assert cublas_workspace_bytes((9, 0)) == cublas_workspace_bytes((12, 0)) == 32 * MIB
    assert uses_flash(torch.bfloat16, 128, False, AMPERE)
    assert not uses_flash(torch.bfloat16, 128, True, AMPERE)  # a mask
    assert not uses_flash(torch.float32, 128, False, AMPERE)
    assert not uses_flash(torch.float16, 128, False, TURING)
    assert uses_flash(torch.bfloat16, 256, False, (8, 9))
    assert not uses_flash(torch.bfloat16, 224, False, (8, 9))


def test_softmax_backward_takes_one_more_tensor_of_scores_and_a_4bit_matmul_the_whole_weight():
    scores = 2 * 64 * 64 * 4

    def work(tracker):
        values = torch.empty(2, 64, 64, requires_grad=True)
        probabilities = F.softmax(values, dim=-1)
        grad = torch.empty(2, 64, 64)
        tracker.phase = "backward"
        return torch.autograd.grad(probabilities, values, grad)

    assert peak_of(work).total() == 3 * scores + scores + scores  # values, result, gradient; new gradient, scratch

    def work(tracker):
        packed, state = quantize_4bit(torch.empty(1024, 512, dtype=torch.bfloat16), quant_type="nf4", compress_statistics=False)
        values = torch.empty(600, 512, dtype=torch.bfloat16)
        tracker.phase = "backward"
        work.before = tracker.live_bytes
        return torch.ops.bitsandbytes.gemm_4bit.default(values, packed, [1024, 512], state.absmax, 64, "nf4")

    assert peak_of(work).total() - work.before == 1024 * 512 * 2 + 600 * 1024 * 2


@pytest.mark.parametrize(
    ("capability", "dtype", "heads", "scratch"),
    [
        # softmax_d (rows rounded to 128) and dq in fp32; with grouped queries dk and dv of every head
        (AMPERE, torch.bfloat16, 4, 4 * 256 * 4 + 4 * 256 * 64 * 4),
        (AMPERE, torch.bfloat16, 2, 4 * 256 * 4 + 4 * 256 * 64 * 4 + 2 * 200 * 4 * 64 * 2),
        # delta and tiles of dq (16 bytes and 64 x 64 floats each)
        (TURING, torch.float16, 4, 4 * 200 * 4 + 4 * 4 * (16 + 64 * 64 * 4)),
        (AMPERE, torch.float32, 4, 4 * 200 * 4 + 4 * 4 * (16 + 64 * 64 * 4)),
    ],
)
def test_attention_backward_scratch_by_hand(capability, dtype, heads, scratch):
    def work(tracker):
        query = torch.empty(1, 4, 200, 64, dtype=dtype, requires_grad=True)
        key = torch.empty(1, heads, 200, 64, dtype=dtype, requires_grad=True)
        out = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=heads != 4)
        grad = torch.empty_like(out)
        tracker.phase = "before"
        tracker.record()
        before = tracker.live_bytes
        tracker.phase = "backward"
        grads = torch.autograd.grad(out, (query, key), grad)
        work.before = before
        return grads

    peak = peak_of(work, capability)
    size = dtype.itemsize
    grads_bytes = 4 * 200 * 64 * size + 2 * heads * 200 * 64 * size  # dq, dk, dv
    assert abs(peak.total() - work.before - grads_bytes - scratch) <= 6 * 512  # each buffer is rounded up


@pytest.mark.parametrize(
    ("function", "dtype", "element_bytes"),
    [
        (lambda x: F.softmax(x, dim=-1, dtype=torch.float32), torch.bfloat16, 2 + 4),  # reads 16 bit directly
        (lambda x: F.dropout(x, 0.1), torch.float32, 4 + 4 + 1),  # keeps a mask of one byte
    ],
)
def test_softmax_and_dropout_take_what_they_do_on_cuda(function, dtype, element_bytes):
    def work(tracker):
        values = torch.empty(64, 64, dtype=dtype, requires_grad=True)
        tracker.phase = "backward"
        return function(values)

    assert peak_of(work).total() == 64 * 64 * element_bytes


def test_autocast_computes_in_fp32_what_cuda_does_also_in_backward_and_all_patches_are_undone():
    before = (torch.is_autocast_enabled, F.softmax)
    with card_semantics(0), torch.autocast("cpu", torch.bfloat16):
        values = torch.ones(4, 4, dtype=torch.bfloat16)
        weight = torch.ones(4, dtype=torch.bfloat16)
        assert torch.is_autocast_enabled()
        assert F.layer_norm(values, (4,), weight).dtype == torch.float32
        assert values.sum().dtype == (values**2).dtype == torch.float32
        assert (values @ values).dtype == torch.bfloat16
    with card_semantics(0):
        assert not torch.is_autocast_enabled()
        assert F.layer_norm(torch.ones(4, 4, dtype=torch.bfloat16), (4,)).dtype == torch.bfloat16
    assert (torch.is_autocast_enabled, F.softmax) == before
    assert not torch.is_autocast_enabled()

    class Function(torch.autograd.Function):
        forward = staticmethod(torch.amp.custom_fwd(lambda _, x: x.clone(), device_type="cuda"))
        backward = staticmethod(torch.amp.custom_bwd(lambda _, g: g + torch.is_autocast_enabled(), device_type="cuda"))

    x = torch.ones(1, requires_grad=True)
    with card_semantics(0):
        with torch.autocast("cpu", torch.bfloat16):
            out = Function.apply(x)
        out.backward()
    assert x.grad == 2


def test_a_fake_mask_selects_the_trained_tokens_and_recomputation_takes_the_same_paths():
    with card_semantics(5), FakeTensorMode():
        hidden, mask = torch.empty(2, 8, 16, requires_grad=True), torch.empty(2, 8, dtype=torch.bool)
        selected = hidden[mask]
        assert selected.shape == (5, 16)
        backward(selected.sum())
        assert hidden.grad.shape == hidden.shape
    seen = []

    def layer(values):
        out = F.layer_norm(values, (4,))
        seen.append(out.dtype)
        return out * out  # keeps `out`, so the recomputation comes this far

    with card_semantics(0):
        values = torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = checkpoint(layer, values, use_reentrant=False).sum()
        backward(loss)
    assert seen == [torch.float32, torch.float32]


def two_layers(tracker):
    """relu(x A) B, summed, with a backward: every tensor is known."""
    tracker.part = "weights"
    first = torch.nn.Parameter(torch.empty(WIDTHS[0], WIDTHS[1]))
    second = torch.nn.Parameter(torch.empty(WIDTHS[1], WIDTHS[2]))
    tracker.phase, tracker.part = "forward", "activations"
    inputs = torch.empty(ROWS, WIDTHS[0])
    loss = (torch.relu(inputs @ first) @ second).sum()
    tracker.phase, tracker.part = "backward", "workspace"
    loss.backward()
    return first, second


@pytest.mark.parametrize("fake", [False, True], ids=["real tensors", "fake tensors"])
def test_two_layer_model_by_hand(fake):
    tracker = StorageTracker()
    with FakeTensorMode() if fake else contextlib.nullcontext(), tracker:
        parameters = two_layers(tracker)
    weights = 4 * (64 * 128 + 128 * 32)
    hidden, out, inputs = 4 * ROWS * 128, 4 * ROWS * 32, 4 * ROWS * 64
    # Forward: the product is there until relu has read it; then the output beside relu's result, which backward needs.
    assert tracker.peaks[("forward", None)].total() == weights + inputs + 2 * hidden
    assert hidden > out + MIN_BLOCK
    # Backward, at its highest: the loss and its gradient (512 bytes each), the kept input and relu's result, the second
    # layer's gradient, the gradient of relu's result and of its input.
    gradient = 4 * 128 * 32
    at_relu = weights + inputs + hidden + 2 * MIN_BLOCK + gradient + 2 * hidden
    # and once more for the first layer's gradient, when relu's result is no longer needed
    at_first = weights + inputs + 2 * MIN_BLOCK + gradient + hidden + 4 * 64 * 128
    assert tracker.peaks[("backward", None)].total() == max(at_relu, at_first)
    assert tracker.live[("weights", None)] == weights
    assert all(parameter.grad is not None for parameter in parameters)


def test_requests_are_rounded_up_to_512_bytes_and_views_and_in_place_operations_allocate_nothing():
    assert [rounded(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    tracker = StorageTracker()
    with tracker:
        tensors = [torch.empty(1), torch.empty(128), torch.empty(129), torch.empty(0)]
    assert tracker.live_bytes == 512 + 512 + 1024
    del tensors
    assert tracker.live_bytes == 0
    tracker = StorageTracker()
    with tracker:
        values = torch.empty(64, 64)
        views = [values.t(), values[:3], values.view(-1), values.mul_(2)]
    assert tracker.live_bytes == 64 * 64 * 4
    del values
    assert tracker.live_bytes == 64 * 64 * 4  # a view holds the storage
    del views
    assert tracker.live_bytes == 0


def test_host_memory_and_scratch_are_counted_apart_and_gradients_by_their_own_part_and_layer():
    tracker = StorageTracker()
    with FakeTensorMode(), tracker:
        device, host = torch.empty(1000), torch.empty(1000, device="meta")
    assert tracker.live_bytes == rounded(4000)
    assert tracker.host.total() == 4096
    del device, host
    tracker = StorageTracker()
    with tracker:
        values = torch.empty(128)
        tracker.scratch(600, 100)
    peak = tracker.peaks[("load", None)]
    assert peak.total() == 512 + 1024 + 512
    assert peak[("workspace", None)] == 1536
    assert tracker.live_bytes == 512
    del values
    tracker = StorageTracker()
    with tracker, tracker.tagging("workspace"):
        values = torch.empty(256)
        tracker.retag(values, "gradients", 7)
    assert tracker.live[("gradients", 7)] == 1024
    assert tracker.live[("workspace", None)] == 0
    tracker = StorageTracker()
    with tracker:
        tracker.layer = 3
        values = [torch.ones(4)]
        tracker.layer = 5
        values.append(torch.ones(4))
        tracker.layer = None
        roots = torch._foreach_sqrt(values)
    assert tracker.live[("weights", 3)] == tracker.live[("weights", 5)] == 1024
    assert len(roots) == 2
