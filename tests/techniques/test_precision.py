"""Adapters in bf16 lose small updates; the builder's fp32 adapters and fp32 master weights don't."""

import pytest
import torch
from tiny_training import adapted, batch, settings_for, trained

from finetune.model.adapters import cast_trainable
from finetune.model.cpu_adamw import CpuAdamW

RATE = 1e-5  # the last part of a schedule


def moved_share(model, optimizer, steps=6) -> float:
    """Share of the adapters' A weights (not zero at the start) that have changed after some small steps."""
    before = [parameter.detach().float().clone() for parameter in trained(model)]
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = [(old, new.detach().float()) for old, new in zip(before, trained(model), strict=True) if old.abs().max() > 0]
    return float(torch.cat([(old != new).flatten() for old, new in pairs]).float().mean())


def as_trl_leaves_them(base) -> torch.nn.Module:
    """A 4-bit model whose adapters were cast to bf16, as TRL's SFTTrainer does."""
    model = adapted(settings_for(base, dtype="bfloat16", load_in_4bit=True))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05, generator=generator)
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


@pytest.mark.slow
def test_bf16_adapters_lose_small_updates(base):
    model = as_trl_leaves_them(base)
    assert moved_share(model, torch.optim.AdamW(trained(model), lr=RATE, weight_decay=0.0)) < 0.2


def test_restored_adapters_keep_every_small_update(base):
    model = as_trl_leaves_them(base)
    cast_trainable(model, torch.float32)
    assert {parameter.dtype for parameter in trained(model)} == {torch.float32}
    assert moved_share(model, torch.optim.AdamW(trained(model), lr=RATE, weight_decay=0.0)) > 0.99


@pytest.mark.slow
def test_fp32_masters_on_the_host_keep_them_for_bf16_adapters(base):
    model = as_trl_leaves_them(base)
    optimizer = CpuAdamW(trained(model), lr=RATE)
    share = moved_share(model, optimizer)
    masters = torch.cat([optimizer.state[parameter]["master"].flatten() for parameter in trained(model)])
    rounded = torch.cat([parameter.detach().float().flatten() for parameter in trained(model)])
    assert (masters != rounded).float().mean() > 0.9  # what the weights can't show yet is not forgotten
    plain = as_trl_leaves_them(base)
    assert share > moved_share(plain, torch.optim.AdamW(trained(plain), lr=RATE, weight_decay=0.0))


def test_the_builder_makes_fp32_adapters(base):
    for changes in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "load_in_4bit": True}):
        assert {parameter.dtype for parameter in trained(adapted(settings_for(base, **changes)))} == {torch.float32}
