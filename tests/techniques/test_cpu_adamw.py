"""AdamW with its state in host memory: the same numbers as torch's, fp32 masters, and an exact resume."""

import copy
import io

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.lr_scheduler import CosineAnnealingLR

from finetune.memory.tracker import StorageTracker
from finetune.model.techniques import CpuAdamW

ARGUMENTS = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.1}


def layers(dtype=torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).to(dtype)


def groups(model) -> list[dict]:
    """Parameter groups: weight decay for matrices only, and another learning rate for the last layer."""
    return [
        {"params": [model[0].weight]},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
        {"params": [model[2].weight], "lr": 1e-2},
    ]


def optimizer_for(model, kind=CpuAdamW, **more):
    return kind(groups(model), **ARGUMENTS, **more)


def train(model, optimizer, steps, first=0, scheduler=None) -> None:
    """Accumulates over two micro-batches and clips, as Trainer does."""
    for step in range(first, first + steps):
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + micro)
            inputs = torch.randn(16, 32, generator=generator, dtype=torch.float32).to(model[0].weight.dtype)
            (model(inputs).float().pow(2).mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def saved(optimizer) -> dict:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_fp32_weights_are_updated_as_by_torch_to_the_bit_and_bf16_ones_follow_fp32_masters():
    ours, theirs = layers(), layers()
    optimizer, reference = optimizer_for(ours), optimizer_for(theirs, torch.optim.AdamW, fused=True)
    train(ours, optimizer, 12, scheduler=CosineAnnealingLR(optimizer, 12))
    train(theirs, reference, 12, scheduler=CosineAnnealingLR(reference, 12))
    assert torch.equal(weights(ours), weights(theirs))
    assert not torch.equal(weights(ours), weights(layers()))
    ours, exact = layers(torch.bfloat16), layers(torch.bfloat16).float()
    optimizer = CpuAdamW(ours.parameters(), lr=1e-5)
    reference = torch.optim.AdamW(exact.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    for _ in range(50):  # updates of 1e-5 are below bf16's resolution of most weights
        for parameter, other in zip(ours.parameters(), exact.parameters(), strict=True):
            parameter.grad = torch.ones_like(parameter)
            other.grad = torch.ones_like(other)
        optimizer.step()
        reference.step()
    assert torch.equal(weights(ours), weights(exact).bfloat16())
    assert (weights(ours) != weights(layers(torch.bfloat16))).float().mean() > 0.3


def test_the_state_is_of_what_has_a_gradient_and_loading_it_sets_the_weights_to_their_masters():
    model = layers()
    optimizer = optimizer_for(model)
    assert optimizer.state_dict()["state"] == {}
    model[0](torch.ones(2, 32)).sum().backward()
    optimizer.step()
    assert {id(parameter) for parameter in optimizer.state} == {id(model[0].weight), id(model[0].bias)}
    assert torch.equal(model[2].weight, layers()[2].weight)
    model = layers()
    optimizer = optimizer_for(model)
    train(model, optimizer, 3)
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
    optimizer_for(rounded).load_state_dict(saved(optimizer))
    assert torch.equal(weights(rounded), weights(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_continuing_from_a_file_is_the_same_to_the_bit(dtype):
    whole, first = layers(dtype), layers(dtype)
    whole_optimizer, first_optimizer = optimizer_for(whole), optimizer_for(first)
    train(whole, whole_optimizer, 8)
    train(first, first_optimizer, 3)
    second = copy.deepcopy(first)
    second_optimizer = optimizer_for(second)
    second_optimizer.load_state_dict(saved(first_optimizer))
    train(second, second_optimizer, 5, first=3)
    assert torch.equal(weights(second), weights(whole))
    for ours, theirs in zip(second_optimizer.state.values(), whole_optimizer.state.values(), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_in_a_forecast_the_state_is_not_on_the_card():
    def card_bytes(kind) -> int:
        with FakeTensorMode(), StorageTracker() as tracker:
            model = torch.nn.Linear(64, 64, bias=False)
            before = tracker.live_bytes
            optimizer = kind(model.parameters())
            for _ in range(2):
                model(torch.empty(4, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return tracker.live_bytes - before

    assert card_bytes(CpuAdamW) == 0
    assert card_bytes(torch.optim.AdamW) >= 2 * 64 * 64 * 4
