"""Weights on the card only while they are used, of layers and of the input embedding: the same numbers, or a refusal."""

import copy
import functools
import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from lean_models import fill_adapters, gradients, model_of, tokens
from tiny_training import BASES, adapted, autocast, batch, optimizer_of, save_tiny_base, settings_for, trained

from finetune.errors import RecipeError
from finetune.layers.checkpointing import decoder_layers
from finetune.layers.layer_offloading import (
    layout_bytes,
    offload_embedding,
    offloadable_embedding,
    offloaded_numbers,
    offloading_of,
    tensor_layout,
)
from finetune.layers.offload import InOrder
from finetune.model.build import build_base
from finetune.model.techniques import apply_techniques, step_context
from finetune.model.transformers_config import load_config
from finetune.settings.compatibility import BUFFERS

#: Every layer is recomputed.
RECOMPUTED = {"activation_checkpointing": True}
KINDS = {"16-bit": {"dtype": "bfloat16"}, "nf4": {"dtype": "bfloat16", "load_in_4bit": True}}
TECHNIQUES = {
    "plain": {}, "lean": {"lean_layers": True}, "dora": {"use_dora": True}, "dropout": {"lora_dropout": 0.1},
    "selective": {"activation_checkpointing": "selective"}, "inputs": {"activation_checkpointing": "offload"},
    "one-target": {"target_modules": ["q_proj"]},  # the backward of down_proj needs nothing that is recomputed
}  # fmt: skip


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


def built(settings, copies=None):
    """The model of a run; `copies` fills the buffers."""
    model = adapted(settings)
    fill_adapters(model)
    offloading = offloading_of(model)
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


COPIES = {"early": InOrder, "late": Late, "thread": Threaded}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(layers, tied) -> folder of a tiny model."""
    return functools.cache(
        lambda layers=3, tied=False: save_tiny_base(tmp_path_factory.mktemp("base"), hidden=64, layers=layers, tied=tied)
    )


@pytest.fixture(scope="module")
def resident():
    """resident(settings) -> the trace of the run whose layers stay where they are; made once."""
    traces = {}

    def of(settings):
        key = settings.model_dump_json()
        if key not in traces:
            traces[key] = trace_of(built(settings), settings)
        return traces[key]

    return of


def recomputed(base, **changes):
    return settings_for(base, **RECOMPUTED | changes)


def offloaded(settings, storage="cpu", count=99):
    return settings.model_copy(update={"layer_offloading": storage, "offloaded_layers": count})


FAST = [("16-bit", 3, False, "one-target", "cpu", "late"), ("nf4", 4, True, "dora", "nvme", "thread")]
ALL = itertools.product(KINDS, (3, 4), (False, True), TECHNIQUES, ("cpu", "nvme"), COPIES)
CASES = [*FAST, *(pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for case in ALL if case not in FAST)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layers", "tied", "technique", "storage", "copies"), CASES)
def test_losses_and_adapters_are_those_of_resident_layers_to_the_bit(
    saved, resident, kind, layers, tied, technique, storage, copies
):
    settings = recomputed(saved(layers, tied), **KINDS[kind] | TECHNIQUES[technique])
    model = built(offloaded(settings, storage), COPIES[copies]())
    assert equal_traces(trace_of(model, settings), resident(settings))


@pytest.mark.parametrize("count", [1, 2])
def test_some_layers_stay_resident(saved, resident, count):
    settings = recomputed(saved(), dtype="bfloat16")
    model = built(offloaded(settings, count=count), Late())
    assert len(offloading_of(model).buffers) == min(count, BUFFERS)
    assert equal_traces(trace_of(model, settings), resident(settings))


def test_without_the_wait_the_losses_would_be_garbage(saved, resident):
    settings = recomputed(saved(), dtype="bfloat16")
    assert not equal_traces(trace_of(built(offloaded(settings), Careless()), settings), resident(settings))


def test_all_layers_take_no_more_than_the_buffers_and_are_copied_twice_a_micro_batch_unless_still_there(saved, monkeypatch):
    model = built(offloaded(recomputed(saved(4), dtype="bfloat16")))
    buffers = offloading_of(model).buffers
    largest = max(layout_bytes(tensor_layout(layer)) for layer in decoder_layers(model))
    matrices = [p for layer in decoder_layers(model) for p in layer.parameters() if p.dim() > 1 and not p.requires_grad]
    storages = {p.untyped_storage().data_ptr() for p in matrices}
    assert storages == {buffer.data_ptr() for buffer in buffers} and len(matrices) == 4 * 7
    assert [buffer.nbytes for buffer in buffers] == [largest] * BUFFERS
    copies, storage = [], offloading_of(model)._storage
    fetch = storage.fetch
    monkeypatch.setattr(storage, "fetch", lambda index, *arguments: (copies.append(index), fetch(index, *arguments))[1])
    for times in (1, 2):
        model(**batch(0, tokens=16)).loss.backward()
        assert len(copies) == times * (2 * 4 - BUFFERS) - (times - 1) * BUFFERS


def test_a_layer_that_is_not_recomputed_and_a_part_of_a_layer_are_refused_when_they_run(saved):
    settings = recomputed(saved(), dtype="bfloat16")
    model = built(offloaded(settings))
    for other in ({"activation_checkpointing": False}, {"activation_checkpointing_every_n_layers": 2}):
        apply_techniques(model, settings.model_copy(update=other))
        with pytest.raises(RuntimeError, match="not recomputed"):
            model(**batch(0, tokens=16))
    apply_techniques(model, settings)
    model.eval()
    with pytest.raises(RuntimeError, match="not recomputed"):
        model(**batch(0, tokens=16))
    with torch.no_grad(), pytest.raises(RuntimeError, match="call the whole layer"):
        decoder_layers(model)[1].mlp(torch.zeros(1, 64, dtype=torch.bfloat16))


def test_int8_weights_are_refused_and_a_file_that_was_cut_off_is_noticed_each_time(saved):
    settings = recomputed(saved(), dtype="bfloat16")
    model = built(offloaded(settings, "nvme"))
    offloading_of(model)._storage._file.truncate(4096)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(OSError, match="bytes too early"):
            model(**batch(0, tokens=16))
    settings = offloaded(recomputed(saved(), dtype="bfloat16", load_in_8bit=True))
    with pytest.raises(RecipeError, match="int8"):
        build_base(settings, load_config(settings), device="cpu", weights=True, offloads=True)


@pytest.mark.parametrize(("layers", "count", "numbers"), [(4, 9, [0, 1, 2, 3]), (4, 2, [1, 3]), (5, 2, [2, 4]), (3, 1, [2])])
def test_offloaded_layers_are_spread_evenly(layers, count, numbers):
    assert offloaded_numbers(layers, count) == numbers


def test_an_embedding_in_host_memory_gives_the_same_bits_is_no_parameter_and_stays_when_the_model_moves():
    model = model_of("llama")
    before, answer = gradients(model, tokens()), model(input_ids=tokens()).logits
    apply_techniques(model, settings_for("none", offload_embeddings=True))
    assert torch.equal(gradients(model, tokens()), before) and torch.equal(model(input_ids=tokens()).logits, answer)
    apply_techniques(model, settings_for("none", activation_checkpointing=True))
    assert torch.equal(gradients(model, tokens()), before)
    assert torch.equal(gradients(copy.deepcopy(model), tokens()), before)
    model = model_of("llama")
    names = {name for name, _ in model.named_parameters()}
    offload_embedding(model)
    (table,) = names - {name for name, _ in model.named_parameters()}
    assert table.endswith("embed_tokens.weight")
    embedding = model.get_base_model().get_input_embeddings()
    weight = embedding.weight
    model.to(torch.float64)
    assert embedding.weight is weight and weight.dtype == torch.float32


def test_a_table_that_the_output_layer_shares_is_refused(base):
    model = adapted(settings_for(base, **BASES["lora"]))  # tied
    assert offloadable_embedding(model) is None
    with pytest.raises(RecipeError, match="offload_embeddings"):
        offload_embedding(model)
