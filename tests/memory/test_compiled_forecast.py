"""What compiled layers keep by the forecast, against real compiled layers on the CPU."""

import functools
from contextlib import contextmanager

import pytest
import torch
from tiny_models import config_values, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from finetune.compat.bitsandbytes import own_quantisation_maps
from finetune.layers.checkpointing import decoder_layers
from finetune.layers.compiled import Compilations, compile_layers, use_operators
from finetune.memory.compiled_layers import SplitLayers
from finetune.memory.fake_model import materialise
from finetune.memory.forecast import RowShape
from finetune.memory.ledger import LargestStep
from finetune.memory.tracker import StorageTracker
from finetune.model.adapters import attach_adapters, prepare_for_training
from finetune.model.build import build_base
from finetune.model.transformers_config import config_from

TOKENS = 192
BITS = {"nf4": {"load_in_4bit": True}, "bf16": {"load_in_4bit": False}}


def a_model(bits, folder=None):
    """A tiny llama with adapters in NF4 or bf16: without data or, with `folder`, with it."""
    wanted = settings(**BITS[bits], activation_checkpointing=False, lora_r=16)
    config = config_from(config_values(num_hidden_layers=2, vocab_size=64), wanted)
    if folder is not None:
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        wanted = wanted.model_copy(update={"model_name_or_path": str(folder)})
    base = build_base(wanted, config, device="cpu", weights=folder is not None)
    model = attach_adapters(base, wanted)
    prepare_for_training(model, wanted)
    return model


def saved_bytes(model, layer):
    """Bytes of all storages that the layer saves for backward, without its weights, by the hooks on saved tensors."""
    run = a_pass(model, layer, TOKENS)
    run().sum().backward()  # compiles
    seen = {}
    weights = {tensor.untyped_storage()._cdata for tensor in (*layer.parameters(), *states_of(layer))}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            seen[storage._cdata] = storage  # alive, so that no other gets its number
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    assert out.requires_grad
    return sum(storage.nbytes() for storage in seen.values())


def a_pass(model, layer, tokens):
    x = torch.randn(1, tokens, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    places = model.get_base_model().model.rotary_emb(x, torch.arange(tokens)[None])

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x, position_embeddings=places, attention_mask=None, use_cache=False)

    return run


def states_of(layer):
    for parameter in layer.parameters():
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            yield from (value for value in vars(state).values() if isinstance(value, torch.Tensor))
            state = state.state2


@contextmanager
def split_layer(bits):
    """A layer without data, as the forecast lets it run."""
    model = a_model(bits)
    with own_quantisation_maps(), FakeTensorMode(allow_non_fake_inputs=True):
        materialise(model, StorageTracker(), dtype=torch.bfloat16)
        layer = decoder_layers(model)[1]
        use_operators([layer])
        split = SplitLayers([layer], selective=False)
        yield model, layer
        assert not split.problem


def none_so_far():
    """A count that leaves out what other tests have compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    Compilations().update()
    return Compilations()


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("bits", ["nf4", pytest.param("bf16", marks=pytest.mark.exhaustive)])
def test_the_forecast_of_a_compiled_layer_is_what_a_real_one_saves(tmp_path, bits):
    compilations = none_so_far()
    with split_layer(bits) as (model, layer):
        forecast = saved_bytes(model, layer)
    model = a_model(bits, tmp_path)
    layer = decoder_layers(model)[1]
    uncompiled = saved_bytes(model, layer)
    use_operators([layer])
    compile_layers([layer])
    model.train()
    real = saved_bytes(model, layer)
    compilations.update()
    assert forecast == pytest.approx(real, rel=0.01)
    assert real < 0.6 * uncompiled
    assert compilations.graphs == 1 and not compilations.graph_breaks and compilations.compile_s > 0


@pytest.mark.slow
def test_rows_of_any_length_are_compiled_for_once(tmp_path, monkeypatch):
    compilations = none_so_far()
    model = a_model("bf16", tmp_path).train()
    layer = decoder_layers(model)[1]
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # whatever makes the code
    use_operators([layer])
    compile_layers([layer])
    for tokens in (192, 64, 128, 321, 77):
        a_pass(model, layer, tokens)().sum().backward()
    compilations.update()
    assert (compilations.graphs, compilations.recompiles, compilations.graph_breaks) == (1, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "technique",
    [
        {"activation_checkpointing": False}, {"activation_checkpointing": True}, {"activation_checkpointing": "selective"},
        {"activation_checkpointing": False, "lora_dropout": 0.1},
        {"activation_checkpointing": False, "packing": True, "attn_implementation": "torch_varlen"},
    ],
    ids=str,
)  # fmt: skip
def test_compiled_layers_need_no_more_than_ordinary_ones(technique):
    settings_by_layers = {"compiled": {"torch_compile": True}, "ordinary": {}}
    runs = {
        name: LargestStep(config_values(), settings(**technique, **more), RowShape(TOKENS)).dry_run()
        for name, more in settings_by_layers.items()
    }
    assert "repeated" in runs["compiled"].method and not any("can't be forecast" in note for note in runs["compiled"].notes)
    assert runs["compiled"].parts["activations"] <= runs["ordinary"].parts["activations"]
    assert runs["compiled"].peaks["train"] <= 1.01 * runs["ordinary"].peaks["train"]
