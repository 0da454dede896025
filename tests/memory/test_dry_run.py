"""The parts of a dry run by arithmetic and by properties; its cache; what can't be forecast."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny_models import config_values, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from finetune.card.card import Card, expandable_segments
from finetune.compat.bitsandbytes import own_quantisation_maps
from finetune.errors import RecipeError
from finetune.memory import cache
from finetune.memory.caching_allocator import rounded
from finetune.memory.depth import at_depth
from finetune.memory.device_peak import make_forecast, process_bytes
from finetune.memory.fake_model import _packed_8bit
from finetune.memory.forecast import PARTS, Batch, RowShape
from finetune.memory.ledger import LargestStep
from finetune.memory.simulate import simulate, step_errors
from finetune.memory.tracker import StorageTracker
from finetune.model.configuration import catalogue
from finetune.model.transformers_config import config_from
from finetune.units import GIB, MIB

CARD = Card("a card", 12 * GIB, 11 * GIB, (8, 6), context_bytes=300 * MIB, context_uncertainty_bytes=100 * MIB)
#: Width in and out of q, k, v, o, gate, up and down in the small Llama.
WIDTHS = [(256, 256), (256, 128), (256, 128), (256, 256), (256, 512), (256, 512), (512, 256)]
#: Settings of a run on the CPU.
ON_CPU = {"dtype": "float32", "load_in_4bit": False, "optim": "adamw_torch"}


def run(kind="llama", micro_batch=1, tokens=128, layers=3, capability=(8, 6), **more):
    values = config_values(kind, num_hidden_layers=layers)
    wanted = settings(kind, per_device_train_batch_size=micro_batch, **more)
    return LargestStep(values, wanted, RowShape(tokens), capability).dry_run()


def test_adapters_optimizer_and_nf4_weights_by_arithmetic_and_all_parts_sum_to_the_peak():
    dry = run(lora_r=16)
    adapters = 3 * sum(rounded(4 * 16 * i) + rounded(4 * 16 * o) for i, o in WIDTHS)
    assert adapters == 3 * sum(4 * 16 * (i + o) for i, o in WIDTHS)  # r x (in + out) x 4 bytes
    assert dry.parts["adapters"] == dry.parts["gradients"] == adapters
    steps = 2 * 3 * len(WIDTHS) * 512  # a step count for each tensor
    assert dry.parts["optimizer"] == 2 * adapters + steps
    dry = run()
    linear = 0
    for i, o in WIDTHS:
        count = i * o
        scales, outer = count // 64, -(-(count // 64) // 256) * 4  # one byte for 64 weights, a float for 256 scales
        # packed codes, scales, their scales, the mean of the scales, the 16 values of NF4 and the 256 of the scales' code
        linear += count // 2 + rounded(scales) + rounded(outer) + 512 + 512 + 1024
    norms, embedding, rotary, code_book = 7 * 512, 2 * 1024 * 256 * 2, 2 * 512, 1024
    assert dry.parts["weights"] == 3 * linear + norms + embedding + rotary + code_book
    dry = run(layers=6)
    assert set(dry.parts) == set(PARTS)
    assert dry.allocated_bytes == sum(dry.parts.values()) == dry.peaks["train"] and dry.layers == 6
    assert dry.peaks["train"] > dry.peaks["eval"] > dry.peaks["save"] > 0
    assert dry.peaks["load"] > 0
    assert dry.parameters == 6 * (sum(i * o for i, o in WIDTHS) + 512) + 2 * 1024 * 256 + 256


@pytest.mark.parametrize("double", [True, False])
def test_a_fake_weight_is_quantised_into_the_tensors_of_a_real_one(double):
    taken = []
    for fake in (True, False):
        with own_quantisation_maps() if fake else nullcontext(), FakeTensorMode() if fake else nullcontext():
            quantize_4bit(torch.zeros(64, 64), quant_type="nf4", compress_statistics=double)  # makes the shared code book
            tracker = StorageTracker()
            with tracker:
                packed = quantize_4bit(torch.zeros(256, 512), quant_type="nf4", compress_statistics=double)
            taken.append((tracker.live_bytes, tracker.peaks[("load", None)].total()))
            del packed
    assert taken[0] == taken[1]


@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_fake_and_real_tensors_have_the_same_peaks(monkeypatch, checkpointing):
    wanted = settings(**ON_CPU, gradient_accumulation_steps=2, activation_checkpointing=checkpointing)
    config, batch = config_from(config_values(num_hidden_layers=2), wanted), Batch(1, 128, 127, held_out=Batch(1, 128, 127))
    without_data = simulate(config, wanted, batch, None)
    monkeypatch.setattr("finetune.memory.fake_tensors.fake_tensor_mode", nullcontext)
    assert simulate(config, wanted, batch, None).peaks == without_data.peaks


def test_fewer_trained_tokens_take_less_and_padded_rows_or_dropped_attention_no_more():
    values = config_values(num_hidden_layers=2)
    some, all_of_them = (
        LargestStep(values, settings(), RowShape(2048, share)).dry_run().allocated_bytes for share in (0.05, 1.0)
    )
    assert some < all_of_them
    single, double = (run(tokens=512, micro_batch=rows, activation_checkpointing=False) for rows in (1, 2))
    assert 1.9 * single.parts["activations"] < double.parts["activations"] <= 2 * single.parts["activations"]
    peaks = [
        LargestStep(config_values(num_hidden_layers=2, attention_dropout=p), settings(), RowShape(128)).dry_run().peaks
        for p in (0.1, 0.0)
    ]
    assert peaks[0] == peaks[1]


@pytest.mark.slow
def test_the_techniques_save_what_they_say():
    plain = run(tokens=512, activation_checkpointing=False)
    every_layer, offloaded = run(tokens=512), run(tokens=512, activation_checkpointing="offload")
    activations = [dry.parts["activations"] for dry in (plain, every_layer, offloaded)]
    assert activations == sorted(activations, reverse=True) and len(set(activations)) == 3
    assert offloaded.host_bytes > 0 == plain.host_bytes
    optimizers = [
        run(optim=name).parts["optimizer"] for name in ("adamw_torch_fused", "adamw_8bit", "adafactor", "adamw_cpu_offload")
    ]
    assert optimizers == sorted(optimizers, reverse=True) and optimizers[-1] == 0


def test_a_run_on_the_cpu_has_no_cuda_workspace_in_any_format():
    dry = run(capability=None, **ON_CPU)
    assert dry.parts["weights"] == 4 * dry.parameters + 2 * 512  # rotary frequencies
    assert dry.parts["loss"] > 0
    assert run(capability=None, **ON_CPU, load_in_8bit=True).parts["weights"] < dry.parts["weights"] / 2
    packed = run(capability=None, tokens=256, packing=True, attn_implementation="torch_varlen")
    assert packed.parts["activations"] > 0


def test_quantising_to_int8_holds_the_loaded_weight_its_copy_through_the_host_and_the_codes():
    tracker = StorageTracker()
    with FakeTensorMode(), tracker:
        weight = _packed_8bit(torch.nn.Parameter(torch.empty(256, 512, device="meta")), torch.bfloat16)
    count, scales = 256 * 512, 4 * 256
    assert tracker.peaks[("load", None)].total() == (2 + 2 + 1) * count + scales
    assert weight.nbytes + weight.SCB.nbytes == count + scales


def test_a_step_that_fails_with_replaced_layers_says_how_to_keep_the_models_own():
    recipe = settings("llama", load_in_4bit=True, lean_layers=True)
    with pytest.raises(RecipeError) as caught, step_errors(LlamaConfig(), recipe):
        raise RuntimeError("expected scalar type")
    assert "lean_layers=false load_in_4bit=false" in caught.value.fix


@pytest.mark.slow
@hypothesis_settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    tokens=st.integers(16, 1200), rank=st.integers(1, 64), layers=st.integers(1, 9), micro=st.integers(1, 4),
    checkpointing=st.sampled_from([True, False, "selective"]), four=st.booleans(),
    more=st.sampled_from(["tokens", "rank", "layers", "micro"]), by=st.integers(1, 300),
)  # fmt: skip
def test_more_of_anything_never_takes_less(tokens, rank, layers, micro, checkpointing, four, more, by):
    given_values = {"tokens": tokens, "rank": rank, "layers": layers, "micro": micro}
    larger = {**given_values, more: given_values[more] + (by if more == "tokens" else 1 + by % 4)}

    def peaks(values):
        return run(
            tokens=values["tokens"], layers=values["layers"], micro_batch=values["micro"], lora_r=values["rank"],
            activation_checkpointing=checkpointing, load_in_4bit=four,
        ).peaks  # fmt: skip

    before, after = peaks(given_values), peaks(larger)
    assert all(after[phase] >= before[phase] for phase in before)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"model_type": "unheard_of"}, "does not know"),
        ({"model_type": "own", "auto_map": {}}, "needs code"),
        ({"model_type": "llama"}, "has no hidden_size"),
    ],
)
def test_what_can_not_be_forecast_says_why(values, problem):
    with pytest.raises(RecipeError) as caught:
        LargestStep(values, settings(), RowShape(64)).dry_run()
    assert problem in "\n".join(caught.value.problems)


def test_a_second_forecast_is_read_without_torch():
    dry = run()
    script = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); from tiny_models import config_values, settings\n"
        "from finetune.memory.ledger import LargestStep; from finetune.memory.forecast import RowShape\n"
        "run = LargestStep(config_values(num_hidden_layers=3), settings(), RowShape(128), (8, 6)).dry_run()\n"
        "print(json.dumps([run.parts, 'torch' in sys.modules]))"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == [dry.parts, False]


def test_a_damaged_cache_is_recomputed_and_settings_that_hold_no_memory_make_no_new_forecast(home):
    dry = run()
    for file in (home / "cache" / "forecasts").glob("*.json"):
        file.write_text("{")
    assert run() == dry
    before = len(list((home / "cache" / "forecasts").glob("*.json")))
    run(lora_alpha=64, learning_rate=3e-5, seed=7)
    assert len(list((home / "cache" / "forecasts").glob("*.json"))) == before


@pytest.mark.parametrize("package", ["torch", "fla-core", "causal-conv1d", "mamba-ssm", "triton"])
def test_the_key_depends_on_settings_and_on_installing_or_updating_a_package(package, monkeypatch):
    assert cache.key_of(kind="x", settings={"lora_r": 8}) == cache.key_of(settings={"lora_r": 8}, kind="x")
    keys = {cache.key_of(kind="x", settings={"lora_r": rank}) for rank in (8, 9)}
    monkeypatch.setattr(cache, "library_versions", cache.library_versions.__wrapped__)
    for version in (None, "0.6.0", "0.6.1"):
        monkeypatch.setattr(cache, "installed_version", lambda name, version=version: version if name == package else None)
        keys.add(cache.key_of(kind="x"))
    assert len(keys) == 5


def test_the_device_peak_is_an_interval_around_allocated_and_context_and_segments_stay_fixed_on_windows(monkeypatch):
    forecast = make_forecast(config_values(num_hidden_layers=3), settings(), CARD, rows=RowShape(128))
    assert forecast.allocated_bytes <= forecast.reserved_bytes < forecast.peak_bytes
    assert forecast.peak_low_bytes < forecast.peak_bytes < forecast.peak_high_bytes
    assert forecast.peak_high_bytes > forecast.allocated_bytes + CARD.context_bytes + CARD.context_uncertainty_bytes
    assert forecast.parts == run().parts and "layers" in forecast.method
    adapter, merged = forecast.parts["adapters"], 2 * run().parameters
    assert forecast.host_bytes > 0 and forecast.disk_bytes == 13 * adapter + merged  # 4 x (fp32, moments), the adapter
    plain = make_forecast(config_values(num_hidden_layers=3), settings(eval_steps=0), CARD, rows=RowShape(128))
    assert plain.disk_bytes == 10 * adapter + merged  # no best checkpoint beside the last
    monkeypatch.setattr("sys.platform", "win32")
    assert not expandable_segments()


def test_a_cpus_peak_is_a_measured_process_and_data_parallel_training_keeps_buckets_of_the_gradients():
    card = Card("cpu", 8 * GIB, 8 * GIB, source="cpu", context_bytes=0)
    forecast = make_forecast(config_values(num_hidden_layers=2), settings(**ON_CPU), card, rows=RowShape(64))
    assert forecast.peak_bytes - forecast.reserved_bytes == process_bytes() > 300 * MIB
    values = config_values(num_hidden_layers=2)
    many = settings(launch={"num_processes": 2})
    single, parallel = (make_forecast(values, recipe, CARD, rows=RowShape(64)) for recipe in (settings(), many))
    assert parallel.peak_low_bytes - single.peak_low_bytes == pytest.approx(0.98 * single.parts["adapters"], abs=2)


#: Bytes kept for backward per hidden element, token and layer, NF4 with rank 16 (45 to 59 with ordinary layers).
MOST = {"Qwen/Qwen2.5-7B-Instruct": 30.0, "meta-llama/Llama-3.1-8B-Instruct": 23.5, "Qwen/Qwen3-8B": 24.0}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "Qwen/Qwen3-8B")) for name in MOST])
def test_a_layer_of_a_large_model_saves_about_half_the_bytes(name):
    values = catalogue()[name]
    wanted = settings(lora_r=16, activation_checkpointing=False, max_length=2048, lean_layers=True)
    few = at_depth(config_from(values, wanted), 3)
    by_tag = simulate(few, wanted, Batch(1, 2048, 2048 - 1), (8, 9)).peaks[("loss", None)]
    saved = sum(size for (part, layer), size in by_tag.items() if layer == 1 and part in ("activations", "workspace"))
    assert 0.9 * MOST[name] < saved / 2048 / values["hidden_size"] <= MOST[name]
    assert by_tag.get(("workspace", 1), 0) == 0
