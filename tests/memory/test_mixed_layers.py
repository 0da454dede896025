"""Checkpointing every n-th layer: peaks mixed from a run with all layers checkpointed and one with none equal a real run's."""

import pytest
from test_depth import AMPERE, phase_peaks
from tiny_models import config_values, settings

from finetune.memory.depth import has_identical_layers, simulate_deep
from finetune.memory.forecast import Batch
from finetune.memory.mixed_layers import can_mix, mix_layers
from finetune.memory.simulate import simulate
from finetune.model.transformers_config import config_from
from finetune.settings import resolved

ONE_ROW = Batch(rows=1, tokens=192, trained_tokens=100)
PADDED = Batch(rows=4, tokens=192, trained_tokens=400, padded=True, held_out=Batch(2, 192, 400, padded=True))
PACKED = Batch(rows=1, tokens=512, trained_tokens=500, documents=4)


def mixed_and_run(kind, layers, every, batch, **more):
    """The simulation mixed from two runs of few layers, and from one run of all layers."""
    recipe = settings(**more, activation_checkpointing=True, activation_checkpointing_every_n_layers=every)
    config = config_from(config_values(kind, num_hidden_layers=layers), recipe)
    assert can_mix(recipe, has_identical_layers(config))

    def deep(recomputes):
        chosen = resolved(recipe, activation_checkpointing=recomputes, activation_checkpointing_every_n_layers=1)
        return simulate_deep(config, lambda few: simulate(few, chosen, batch, AMPERE), first_differs=not recomputes)[0]

    return mix_layers(deep(True), deep(False), every), simulate(config, recipe, batch, AMPERE)


def assert_same(mixed, run):
    """To a few blocks of the allocator."""
    got, full = phase_peaks(mixed), phase_peaks(run)
    assert got.keys() == full.keys()
    assert {phase: got[phase] - full[phase] for phase in full if abs(got[phase] - full[phase]) > 2048} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layers", "every", "batch"),
    [
        ("llama", 6, 2, ONE_ROW), ("llama", 7, 3, PACKED), ("qwen3", 6, 4, PADDED),
        *(
            pytest.param(*values, marks=pytest.mark.exhaustive)
            for values in (
                ("falcon", 6, 3, PADDED), ("llama", 7, 2, PADDED),
                ("llama", 8, 5, ONE_ROW), ("gpt_neox", 6, 3, ONE_ROW),
                ("mixtral", 6, 3, ONE_ROW), ("qwen3_moe", 6, 3, PADDED),
            )
        ),
    ],
)  # fmt: skip
def test_layers_of_two_runs_give_the_peaks_of_the_mixed_run(kind, layers, every, batch):
    assert_same(*mixed_and_run(kind, layers, every, batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"load_in_4bit": False, "load_in_8bit": True, "lora_dropout": 0.1},
        pytest.param({"use_dora": True, "optim": "adamw_cpu_offload"}, marks=pytest.mark.exhaustive),
        {"int8_activations": True, "attn_implementation": "eager"},
    ],
    ids=str,
)
def test_other_techniques_do_not_change_that(more):
    assert_same(*mixed_and_run("llama", 6, 3, ONE_ROW, **more))


@pytest.mark.parametrize(
    "more", [{"optim": "adafactor"}, {"activation_offloading": True}, {"launch": {"strategy": "deepspeed", "zero_stage": 3}}]
)
def test_what_would_not_be_exact_is_not_mixed(more):
    recipe = settings(activation_checkpointing=True, activation_checkpointing_every_n_layers=2)
    assert can_mix(recipe, identical=True) and not can_mix(recipe, identical=False)
    assert not can_mix(resolved(recipe, **more), identical=True)
