"""A few training steps, an evaluation and an answer of a tiny model, resident or with offloaded layers."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from lean_models import fill_adapters
from tiny_training import adapted, autocast, batch, optimizer_of, trained
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.layers import layer_offloading
from finetune.model.techniques import apply_techniques, step_context

#: Every layer is recomputed.
RECOMPUTED = {"activation_checkpointing": True}


class Late:
    """Copies as late as the waits allow; until then the target is NaN in every floating-point type."""

    def copy(self, target, source, *, after=None):
        target.fill_(0xFF)
        return [lambda: target.copy_(source)]

    def mark(self):
        return None

    def wait(self, copied):
        while copied:
            copied.pop()()

    finish = wait


class Careless(Late):
    """The computation does not wait."""

    def wait(self, copied):
        pass


class Threaded(Late):
    """Copies at some time, by a thread."""

    def __init__(self):
        self.thread, self.random = ThreadPoolExecutor(1), random.Random(0)

    def copy(self, target, source, *, after=None):
        target.fill_(0xFF)

        def copied():
            time.sleep(self.random.random() * 2e-3)
            target.copy_(source)

        return [self.thread.submit(copied).result]


def save_base(path, *, layers=4, tied=True):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=320, max_position_embeddings=256, tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def built(settings, copies=None):
    """The model of a run; `copies` fills the buffers."""
    model = adapted(settings)
    fill_adapters(model)
    offloading = layer_offloading.offloading_of(model)
    if copies is not None:
        offloading._copies = copies
    apply_techniques(model, settings)
    return model


def trace_of(model, settings, steps=3):
    """Losses, held-out losses and an answer, and the adapters at the end."""
    optimizer, seen = optimizer_of(model, settings), []
    torch.manual_seed(5)
    for step in range(steps):
        with step_context(settings, "cpu"), autocast(settings):
            for part in range(2):
                loss = model(**batch(step * 2 + part, tokens=16)).loss
                loss.backward()
                seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), autocast(settings):
            seen.append(model(**batch(77, tokens=16)).loss)
        model.train()
    model.eval()
    ids = batch(3, tokens=8)["input_ids"]
    with torch.no_grad(), autocast(settings):
        seen.append(model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0).float().sum())
    model.train()
    return torch.stack(seen), torch.cat([p.detach().flatten() for p in trained(model)])


def equal_traces(trace, expected):
    return all(torch.equal(a, b) for a, b in zip(trace, expected, strict=True))
