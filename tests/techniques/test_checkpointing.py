"""Gradient checkpointing: the same losses to the bit, fewer bytes saved, with LoRA and QLoRA."""

import pytest
from tiny_training import (
    BASES,
    KINDS,
    RECOMPUTED,
    Operators,
    adapted,
    batch,
    forecast_saved_bytes,
    losses,
    plain_losses,
    settings_for,
)

from finetune.layers.checkpointing import decoder_layers
from finetune.model.techniques import apply_techniques

FORMS = {
    **RECOMPUTED,
    "offload-every-2": {"activation_checkpointing": "offload", "activation_checkpointing_every_n_layers": 2},
    "selective-every-2": {"activation_checkpointing": "selective", "activation_checkpointing_every_n_layers": 2},
}


def attention_runs(settings) -> int:
    model = adapted(settings)
    apply_techniques(model, settings)
    with Operators() as seen:
        model(**batch(0)).loss.backward()
    return seen.counts["aten._scaled_dot_product_flash_attention_for_cpu.default"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_recomputing_gives_the_same_losses_to_the_bit(base, kind, form):
    assert losses(settings_for(base, **BASES[kind], **FORMS[form])) == plain_losses(base, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BASES)
def test_each_form_saves_fewer_bytes_in_the_expected_order(base, kind):
    none, *forms = forecast_saved_bytes(base, kind, {}, *FORMS.values())
    saved_bytes = dict(zip(FORMS, forms, strict=True))
    assert saved_bytes["offload"] < saved_bytes["full"] < saved_bytes["selective"] < saved_bytes["every-2"] < none
    assert saved_bytes["offload-every-2"] < saved_bytes["every-2"] < saved_bytes["selective-every-2"] < none


def test_offload_frees_the_input_of_each_layer(base):
    full, offload = forecast_saved_bytes(base, "lora", FORMS["full"], FORMS["offload"])
    layers, rows, tokens, hidden, itemsize = 4, 2, 64, 128, 4
    assert full - offload == (layers - 1) * rows * tokens * hidden * itemsize


def test_full_recomputes_attention_and_selective_does_not(base):
    assert attention_runs(settings_for(base)) == 4
    assert attention_runs(settings_for(base, activation_checkpointing=True)) == 8
    assert attention_runs(settings_for(base, activation_checkpointing=True, activation_checkpointing_every_n_layers=2)) == 6
    assert attention_runs(settings_for(base, activation_checkpointing="selective")) == 4


def test_the_reentrant_form_that_zero_3_needs_trains_alike(base):
    zero_3 = {"strategy": "deepspeed", "zero_stage": 3}
    assert losses(settings_for(base, activation_checkpointing=True, launch=zero_3, gpu="rtx-4090")) == plain_losses(
        base, "lora"
    )


def test_techniques_can_be_changed_on_one_model(base):
    model = adapted(settings_for(base))
    flags = []
    for changes in ({"activation_checkpointing": True}, FORMS["every-2"], {}, FORMS["offload"]):
        apply_techniques(model, settings_for(base, **changes))
        flags.append([layer.gradient_checkpointing for layer in decoder_layers(model)])
        embedding = model.get_input_embeddings()
        assert len(embedding._forward_hooks) <= 2  # one hook on the input, not one per change
    assert flags == [[True] * 4, [True, False, True, False], [False] * 4, [True] * 4]
