"""A dry run of few layers gives the peaks of the full model, to the byte; so do two runs where every n-th is checkpointed."""

from collections import Counter
from dataclasses import replace

import pytest
from tiny_models import TYPES, config_values, settings

from finetune.memory.depth import AUXILIARY, Depth, at_depth, can_mix, inspect_layers, mix_layers, plan_depth, simulate_deep
from finetune.memory.forecast import Batch
from finetune.memory.ledger import first_layer_saves_less
from finetune.memory.simulate import simulate
from finetune.model.transformers_config import config_from
from finetune.settings import resolved
from finetune.settings.optimizers import OPTIMIZERS

AMPERE = (8, 6)
ONE_ROW = Batch(rows=1, tokens=192, trained_tokens=100, held_out=Batch(1, 192, 100))
#: Types whose layers save other tensors than each other or than Llama's, and how they are checkpointed here.
FEW = [("gemma2", True), ("gpt_oss", False), ("smollm3", True), ("falcon", True), ("mixtral", False)]


def phase_peaks(simulation):
    peaks = Counter()
    for (phase, _), peak in simulation.peaks.items():
        peaks[phase] = max(peaks[phase], peak.total())
    return dict(peaks)


def assert_same_peaks(deep, full):
    """To the byte, but for the list of gradient norms (4 bytes per adapter), which belongs to no layer."""
    few, all_of_them = phase_peaks(deep), phase_peaks(full)
    assert few.keys() == all_of_them.keys()
    assert {phase: few[phase] - all_of_them[phase] for phase in few if abs(few[phase] - all_of_them[phase]) > 2048} == {}
    assert few["backward"] == all_of_them["backward"] and few["loss"] == all_of_them["loss"]
    assert few.get(AUXILIARY) == all_of_them.get(AUXILIARY)


def both_ways(kind="llama", layers=7, values=None, batch=ONE_ROW, **more):
    """Simulations from a few layers and from all of them, and the first one's method. `values`: more of the config.json."""
    wanted = settings(kind, **more)
    config = config_from(config_values(kind, num_hidden_layers=layers, **(values or {})), wanted)

    def run(config):
        return simulate(config, wanted, batch, AMPERE)

    every, differs = wanted.activation_checkpointing_every_n_layers, first_layer_saves_less(wanted)
    deep, method = simulate_deep(config, run, every, first_differs=differs, full_depth=OPTIMIZERS[wanted.optim].small_states)
    return deep, run(config), method


def test_which_layers_stand_for_all():
    assert plan_depth(["a"] * 32) == Depth(32, 3, 1, 1, 29)
    assert plan_depth(["a"] * 3) == Depth(3, 3)
    assert plan_depth(["a", "b"] * 13) == Depth(26, 6, 2, 2, 10)
    assert plan_depth(["d"] + ["a"] * 26) == Depth(27, 4, 2, 1, 23)  # a first layer of its own
    assert plan_depth((["s"] * 5 + ["f"]) * 5) == Depth(30, 18, 6, 6, 2)
    assert plan_depth((["s"] * 5 + ["f"]) * 5 + ["s"] * 4) == Depth(34, 22, 6, 6, 2)  # not 33, though the last four are equal
    assert plan_depth(["a", "b", "c", "d"]) == Depth(4, 4)
    assert plan_depth(["a"] * 32, every=3) == Depth(32, 11, 3, 3, 7)
    assert plan_depth(["a"] * 32, lead=1) == Depth(32, 4, 2, 1, 28)


def test_layers_that_differ_are_seen_fewer_cut_their_lists_too_and_parameters_are_of_the_full_model():
    recipe = settings()
    assert len(set(inspect_layers(config_from(config_values("llama"), recipe))[0])) == 1
    assert len(set(inspect_layers(config_from(config_values("gemma2"), recipe))[0])) == 2
    no_rope, _ = inspect_layers(config_from(config_values("smollm3", no_rope_layer_interval=4), recipe))
    assert no_rope[3] == no_rope[7] != no_rope[0] == no_rope[4]
    config = config_from(config_values("gemma2"), settings())
    assert at_depth(config, 4).layer_types == config.layer_types[:4]
    assert config.num_hidden_layers == 8
    config = config_from(config_values("llama"), settings())
    layer = 256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512 + 2 * 256
    assert inspect_layers(config)[1] == 8 * layer + 2 * 1024 * 256 + 256


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
def test_every_phase_layer_and_part_is_as_in_the_full_model(checkpointing):
    deep, full, _ = both_ways("llama", 9, activation_checkpointing=checkpointing)
    assert_same_peaks(deep, full)
    assert deep.host == full.host
    top = max(full.peaks, key=lambda phase: full.peaks[phase].total())
    parts, all_parts = ({tag: size for tag, size in run.peaks[top].items() if size > 512} for run in (deep, full))
    assert parts == all_parts
    assert {phase for phase, _ in deep.peaks} >= {"forward", "backward", "eval", "save"}
    differences = {key: peak.total() - full.peaks[key].total() for key, peak in deep.peaks.items()}
    assert {key: more for key, more in differences.items() if abs(more) > 9 * 1024} == {}  # a code book for each layer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [
        pytest.param(kind, checkpointing, marks=() if (kind, checkpointing) in FEW else pytest.mark.exhaustive)
        for kind in TYPES
        for checkpointing in (True, False)
    ],
)
def test_every_model_type_few_layers_and_all(kind, checkpointing):
    layers = {"gemma2": 8, "gpt_oss": 8, "smollm3": 8, "gemma3_text": 4}.get(kind, 5) + (not checkpointing)
    batch = ONE_ROW if checkpointing else replace(ONE_ROW, held_out=None)
    deep, full, method = both_ways(kind, layers, batch=batch, activation_checkpointing=checkpointing)
    assert f"of {layers} layers" in method
    assert_same_peaks(deep, full)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"activation_checkpointing_every_n_layers": 2}, marks=pytest.mark.exhaustive),
        {"activation_checkpointing": "selective"},
        pytest.param({"activation_checkpointing": "offload"}, marks=pytest.mark.exhaustive),
        {"load_in_4bit": False, "load_in_8bit": True},
        pytest.param({"load_in_4bit": False, "optim": "adamw_torch"}, marks=pytest.mark.exhaustive),
        pytest.param({"optim": "adamw_cpu_offload"}, marks=pytest.mark.exhaustive),
        pytest.param({"optim": "paged_adamw_8bit", "lora_r": 256}, marks=pytest.mark.exhaustive),
        {"use_dora": True},
        pytest.param({"lora_dropout": 0.1, "activation_checkpointing": False}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_every_technique_few_layers_and_all(more):
    deep, full, method = both_ways("llama", 8, **more)
    assert "of 8 layers" in method
    assert_same_peaks(deep, full)
    assert deep.host.total() == full.host.total()


@pytest.mark.slow
def test_layers_that_end_amid_a_period_few_and_all_and_adafactor_at_full_depth():
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 4 + ["sliding_attention"] * 4
    deep, full, method = both_ways("gemma3_text", len(kinds), values={"layer_types": kinds})
    assert "19 of 24 layers" in method
    assert_same_peaks(deep, full)
    deep, full, method = both_ways(layers=4, optim="adafactor")
    assert method == "dry run, full depth (4 layers)" and phase_peaks(deep) == phase_peaks(full)


#: One row without an evaluation, and rows of uneven length or packed.
SHORT_ROW = Batch(rows=1, tokens=192, trained_tokens=100)
PADDED = Batch(rows=4, tokens=192, trained_tokens=400, padded=True, held_out=Batch(2, 192, 400, padded=True))
PACKED = Batch(rows=1, tokens=512, trained_tokens=500, documents=4)


def mixed_and_run(kind, layers, every, batch, **more):
    """Checkpointing every n-th layer: mixed from two runs of few layers, and from one run of all layers."""
    recipe = settings(**more, activation_checkpointing=True, activation_checkpointing_every_n_layers=every)
    config = config_from(config_values(kind, num_hidden_layers=layers), recipe)
    assert can_mix(recipe, len(set(inspect_layers(config)[0])) == 1)

    def deep(recomputes):
        chosen = resolved(recipe, activation_checkpointing=recomputes, activation_checkpointing_every_n_layers=1)
        return simulate_deep(config, lambda few: simulate(few, chosen, batch, AMPERE), first_differs=not recomputes)[0]

    return mix_layers(deep(True), deep(False), every), simulate(config, recipe, batch, AMPERE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layers", "every", "batch", "more"),
    [
        ("llama", 6, 2, SHORT_ROW, {}), ("llama", 7, 3, PACKED, {}), ("qwen3", 6, 4, PADDED, {}),
        ("llama", 6, 3, SHORT_ROW, {"load_in_4bit": False, "load_in_8bit": True, "lora_dropout": 0.1}),
        ("llama", 6, 3, SHORT_ROW, {"attn_implementation": "eager"}),
        *(
            pytest.param(*values, marks=pytest.mark.exhaustive)
            for values in (
                ("falcon", 6, 3, PADDED, {}), ("llama", 7, 2, PADDED, {}), ("llama", 8, 5, SHORT_ROW, {}),
                ("gpt_neox", 6, 3, SHORT_ROW, {}), ("mixtral", 6, 3, SHORT_ROW, {}), ("qwen3_moe", 6, 3, PADDED, {}),
                ("llama", 6, 3, SHORT_ROW, {"use_dora": True, "optim": "adamw_cpu_offload"}),
            )
        ),
    ],
)  # fmt: skip
def test_layers_of_two_runs_give_the_peaks_of_the_mixed_run(kind, layers, every, batch, more):
    """To a few blocks of the allocator."""
    mixed, run = map(phase_peaks, mixed_and_run(kind, layers, every, batch, **more))
    assert mixed.keys() == run.keys()
    assert {phase: mixed[phase] - run[phase] for phase in run if abs(mixed[phase] - run[phase]) > 2048} == {}


@pytest.mark.parametrize("more", [{"optim": "adafactor"}, {"launch": {"strategy": "deepspeed", "zero_stage": 3}}])
def test_what_would_not_be_exact_is_not_mixed(more):
    recipe = settings(activation_checkpointing=True, activation_checkpointing_every_n_layers=2)
    assert can_mix(recipe, identical=True) and not can_mix(recipe, identical=False)
    assert not can_mix(resolved(recipe, **more), identical=True)
