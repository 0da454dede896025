"""Each setting that a processor can follow is flipped in a real training, and the adapter held against the setting's row."""

import pytest
from conftest import adapter_hash

from finetune.settings.reference import settings_reference
from finetune.settings.schema import DatasetRecipe, Decides, Recipe, decided_by

pytestmark = pytest.mark.slow
BASE = ("max_steps=2", "save_steps=0", "dataset.max_rows=8", "sample_answers=0", "lora_dropout=0")
BASE += ("per_device_train_batch_size=2", "target_modules=all-linear")
#: Another value, after what must be set as well.
FLIPS = {
    "int8_activations": ((), "true"), "lora_alpha": ((), "32"), "lora_dropout": ((), "0.2"), "use_rslora": ((), "true"),
    "lr_scheduler_type": ((), "constant"), "warmup_ratio": ((), "1.0"), "warmup_steps": ((), "5"), "weight_decay": ((), "0.5"),
    "max_grad_norm": ((), "1e-3"),
}  # fmt: skip
#: Flips that a test of the setting itself shows as well.
SHOWN_ELSEWHERE = {
    "adapter_dtype": (("dtype=bfloat16",), "bfloat16"),
    "dataset.test_split_size": (("dataset.eval_path=null",), "2"),
    "effective_batch_size": (("per_device_train_batch_size=1",), "4"),
    "excess_length": (("dataset.eval_path=null", "max_length=104", "excess_length=drop"), "truncate"),
    "load_in_4bit": ((), "false"), "new_tokens": ((), "[order]"), "optim": ((), "adafactor"),
    "train_on_inputs": ((), "true"), "trained_embedding_rows": ((), "[600, 640]"), "use_dora": ((), "true"),
}  # fmt: skip

#: Settings that decide nothing of the result; flipped together.
WITHOUT_EFFECT = {
    "memory_budget": "1GiB", "host_memory": "8GiB", "layer_offloading": "cpu", "offloaded_layers": "1", "save_steps": "1",
    "loss_spike_factor": "50", "record_memory_history": "true", "save_total_limit": "1", "price_per_hour": "0.5",
}  # fmt: skip


def says(name):
    section, _, inner = name.rpartition(".")
    return decided_by(inner, DatasetRecipe if section else Recipe)


@pytest.fixture(scope="module")
def adapter(make_run, train):
    """adapter(overrides) -> hash of what these settings train; each is trained once."""
    hashes = {}

    def trained(*overrides):
        if overrides not in hashes:
            run = train.whole(make_run(*overrides))
            hashes[overrides] = adapter_hash(run)
        return hashes[overrides]

    return trained


def test_the_flips_are_settings():
    assert {*FLIPS, *SHOWN_ELSEWHERE, *WITHOUT_EFFECT} <= {row.name for row in settings_reference()}


def test_settings_without_effect_leave_the_adapter_as_it_is(adapter):
    assert not any(says(name) & (Decides.RESULT | Decides.EXACTNESS) for name in WITHOUT_EFFECT)
    base = (*BASE, "activation_checkpointing=true")
    assert adapter(*base) == adapter(*base, *(f"{name}={other}" for name, other in WITHOUT_EFFECT.items()))


@pytest.mark.parametrize("name", [*FLIPS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in SHOWN_ELSEWHERE)])
def test_a_setting_that_decides_the_result_changes_the_adapter(adapter, name):
    beside, other = {**FLIPS, **SHOWN_ELSEWHERE}[name]
    assert Decides.RESULT in says(name) and adapter(*BASE, *beside) != adapter(*BASE, *beside, f"{name}={other}")
