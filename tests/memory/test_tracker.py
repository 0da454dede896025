"""The tracker's bytes against bytes counted by hand."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from finetune.memory.caching_allocator import MIN_BLOCK, rounded
from finetune.memory.tracker import StorageTracker

WIDTHS, ROWS = (64, 128, 32), 16


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
    assert tracker.peaks[("forward", None)].total_bytes == weights + inputs + 2 * hidden
    assert hidden > out + MIN_BLOCK
    # Backward, at its highest: the loss and its gradient (512 bytes each), the kept input and relu's result, the second
    # layer's gradient, the gradient of relu's result and of its input.
    gradient = 4 * 128 * 32
    at_relu = weights + inputs + hidden + 2 * MIN_BLOCK + gradient + 2 * hidden
    # and once more for the first layer's gradient, when relu's result is no longer needed
    at_first = weights + inputs + 2 * MIN_BLOCK + gradient + hidden + 4 * 64 * 128
    assert tracker.peaks[("backward", None)].total_bytes == max(at_relu, at_first)
    assert tracker.live[("weights", None)] == weights
    assert all(parameter.grad is not None for parameter in parameters)


def test_requests_are_rounded_up_to_512_bytes():
    assert [rounded(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    tracker = StorageTracker()
    with tracker:
        tensors = [torch.empty(1), torch.empty(128), torch.empty(129), torch.empty(0)]
    assert tracker.live_bytes == 512 + 512 + 1024
    del tensors
    assert tracker.live_bytes == 0


def test_views_and_in_place_operations_allocate_nothing():
    tracker = StorageTracker()
    with tracker:
        values = torch.empty(64, 64)
        views = [values.t(), values[:3], values.view(-1), values.mul_(2)]
    assert tracker.live_bytes == 64 * 64 * 4
    del values
    assert tracker.live_bytes == 64 * 64 * 4  # a view holds the storage
    del views
    assert tracker.live_bytes == 0


def test_host_memory_is_counted_separately_in_powers_of_two():
    tracker = StorageTracker()
    with FakeTensorMode(), tracker:
        device, host = torch.empty(1000), torch.empty(1000, device="meta")
    assert tracker.live_bytes == rounded(4000)
    assert tracker.host.total_bytes == 4096
    del device, host


def test_a_gradient_is_tagged_with_its_own_part_and_layer():
    tracker = StorageTracker()
    with tracker, tracker.tagging("workspace"):
        values = torch.empty(256)
        tracker.retag(values, "gradients", 7)
    assert tracker.live[("gradients", 7)] == 1024
    assert tracker.live[("workspace", None)] == 0


def test_scratch_counts_at_the_peak_and_not_after():
    tracker = StorageTracker()
    with tracker:
        values = torch.empty(128)
        tracker.scratch(600, 100)
    peak = tracker.peaks[("load", None)]
    assert peak.total_bytes == 512 + 1024 + 512
    assert peak.by_tag[("workspace", None)] == 1536
    assert tracker.live_bytes == 512
    del values


def test_outputs_of_foreach_belong_to_their_parameters_layer():
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
