"""Activations leave and return beside the computation: in order, with a bounded number in flight, and each only once."""

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch
from lean_models import adapter_gradients
from tiny_training import adapted, autocast, batch, settings_for

from finetune.layers.offload import WINDOW, Offload, SavedActivations, SideStream


class LateCopies:
    """Copies as late as the waits allow, as a busy PCIe bus does; what is not waited for is garbage.

    A source that was freed before its copy was waited for has been overwritten by later computation.
    """

    def __init__(self):
        self.pending, self.copied = [], 0

    def copy(self, target, source):
        target.fill_(torch.nan if target.is_floating_point() else 77)
        self.pending.append((target, weakref.ref(source)))
        self.copied += 1
        return self.copied

    def wait(self, copied):
        while self.copied - len(self.pending) < copied:
            target, source = self.pending.pop(0)
            if source() is not None:
                target.copy_(source())


class Careless(LateCopies):
    """Computation does not wait for the copies."""

    def wait(self, copied):
        pass


class Hasty(Offload):
    """Frees a tensor on the card before it has been copied."""

    def _free_copied(self, most_bytes):
        self._departing.clear()


def gradients(settings, hooks) -> torch.Tensor:
    model = adapted(settings)
    with hooks, autocast(settings):
        model(**batch(0)).loss.backward()
    return adapter_gradients(model)


@pytest.mark.parametrize("kind", [{}, {"dtype": "bfloat16"}], ids=str)
def test_late_copies_give_the_same_gradients_to_the_bit(base, kind):
    settings = settings_for(base, **kind)
    plain = gradients(settings, contextlib.nullcontext())
    assert torch.equal(gradients(settings, SavedActivations(Offload(LateCopies(), pinned=False))), plain)


@pytest.mark.parametrize("wrong", [Offload(Careless(), pinned=False), Hasty(LateCopies(), pinned=False)])
def test_without_a_wait_the_gradients_would_be_garbage(base, wrong):
    assert gradients(settings_for(base), SavedActivations(wrong)).isnan().any()


@pytest.mark.parametrize("marked", [False, True])
def test_a_copy_waits_for_the_computation_or_a_mark_in_it_and_the_computation_for_the_copy(marked):
    log, on = [], []

    class Stream:
        def __init__(self, device=None):
            self.name = "side" if device else "compute"

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event):
            log.append(f"{self.name} waits for {event}")

        def record_event(self):
            return f"event {len(log)} of {self.name}"

    class Target:
        def copy_(self, source, non_blocking):
            log.append(f"{on[-1].name} copies, {non_blocking=}")

    def stream(entered):
        on.append(entered)
        return contextlib.nullcontext()

    cuda = SimpleNamespace(Stream=Stream, current_stream=lambda device: Stream(), stream=stream)
    copies = SideStream(torch.device("cuda", 0), cuda)
    copies.wait(copies.copy(Target(), torch.zeros(1), after=copies.mark() if marked else None))
    before = "side waits for event 0 of compute" if marked else "side waits for compute"
    assert log == [before, "side copies, non_blocking=True", "compute waits for event 2 of side"]


def test_at_most_two_of_the_largest_tensor_are_in_flight_in_each_direction():
    offload, largest = Offload(LateCopies(), pinned=False), 4000
    tensors = [torch.full((size,), float(index)) for index, size in enumerate([1000, 10, 600, 1000, 1000, 300, 1000])]
    alive, moved = [weakref.ref(tensor) for tensor in tensors], []
    while tensors:
        moved.append(offload.move(tensors.pop(0)))
        offload.note_saved(moved[-1])
        here = [tensor().nbytes for tensor in alive[: len(moved)] if tensor() is not None]
        assert here[-1] == moved[-1].bytes and sum(here) <= WINDOW * largest
    for index in reversed(range(len(moved))):
        assert (offload.load(moved[index]) == index).all()
        ahead = sum(tensor.bytes for tensor in moved[:index] if tensor.on_device is not None)
        assert ahead <= WINDOW * largest and (ahead > 0 or index == 0)
        moved.pop()
    assert all(tensor() is None for tensor in alive)


def test_a_tensor_used_three_times_is_copied_out_and_back_once():
    copies = LateCopies()
    with SavedActivations(Offload(copies, pinned=False)):
        x = torch.randn(64, 128, requires_grad=True) * 1
        sum(x.sin().sum() for _ in range(3)).backward()
    assert copies.copied == 2
