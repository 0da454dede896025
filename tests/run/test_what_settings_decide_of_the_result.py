"""Each setting that a processor can follow is flipped in a real training, and the adapter held against the setting's row."""

import pytest
from conftest import adapter_hash

from finetune.settings.reference import settings_reference
from finetune.settings.schema import Decides, decided_by

pytestmark = pytest.mark.slow
BASE = ("max_steps=2", "save_steps=0", "dataset.max_rows=8", "sample_answers=0", "lora_dropout=0")
BASE += ("per_device_train_batch_size=2", "target_modules=all-linear")
#: Another value; tests of the other settings show their effect.
FLIPS = {
    "lora_alpha": "32", "lora_dropout": "0.2", "use_rslora": "true",
    "lr_scheduler_type": "constant", "warmup_ratio": "1.0", "warmup_steps": "5", "weight_decay": "0.5", "max_grad_norm": "1e-3",
}  # fmt: skip
#: Settings that decide nothing of the result; flipped together.
WITHOUT_EFFECT = {
    "memory_budget": "1GiB", "host_memory": "8GiB", "layer_offloading": "cpu", "offloaded_layers": "1", "save_steps": "1",
    "save_total_limit": "1", "price_per_hour": "0.5",
}  # fmt: skip


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


def test_settings_without_effect_leave_the_adapter_as_it_is(adapter):
    assert {*FLIPS, *WITHOUT_EFFECT} <= {row.name for row in settings_reference()}
    assert not any(decided_by(name) & (Decides.RESULT | Decides.EXACTNESS) for name in WITHOUT_EFFECT)
    base = (*BASE, "activation_checkpointing=true")
    assert adapter(*base) == adapter(*base, *(f"{name}={other}" for name, other in WITHOUT_EFFECT.items()))


@pytest.mark.parametrize(("name", "other"), FLIPS.items())
def test_a_setting_that_decides_the_result_changes_the_adapter(adapter, name, other):
    assert Decides.RESULT in decided_by(name) and adapter(*BASE) != adapter(*BASE, f"{name}={other}")
