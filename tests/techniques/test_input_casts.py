"""LoRA inputs are cast by autocast alone: a seventh fewer bytes saved for backward, losses and gradients to the bit."""

import functools

import pytest
import torch
from lean_models import adapter_gradients, fill_adapters
from peft.tuners.lora import LoraLayer
from tiny_training import RECOMPUTED, adapted, autocast, batch, forecast_model, saved_bytes, settings_for

from finetune.model.techniques import apply_techniques, step_context

EXACT = {
    "16 bit": {},
    "fp16": {"dtype": "float16"},
    "nf4": {"load_in_4bit": True},
    "rsLoRA": {"use_rslora": True},
    **RECOMPUTED,
}
KEPT_CAST = {"dropout": {"lora_dropout": 0.1}, "DoRA": {"use_dora": True}}
settings = functools.partial(settings_for, dtype="bfloat16")


def with_pefts_cast(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        module.__dict__.pop("_cast_input_dtype", None)
    return model


def step(model, wanted) -> tuple[float, torch.Tensor]:
    """Loss and gradients of one step."""
    fill_adapters(model)
    apply_techniques(model, wanted)
    torch.manual_seed(2)
    with step_context(wanted, "cpu"), autocast(wanted):
        loss = model(**batch(0)).loss
        loss.backward()
    return loss.item(), adapter_gradients(model)


@pytest.mark.parametrize("name", EXACT)
def test_losses_and_gradients_are_those_with_pefts_cast_to_the_bit(base, name):
    wanted = settings(base, **EXACT[name])
    loss, gradients = step(adapted(wanted), wanted)
    expected, expected_gradients = step(with_pefts_cast(adapted(wanted)), wanted)
    assert loss == expected and torch.equal(gradients, expected_gradients)
    assert gradients.count_nonzero() > 0.9 * gradients.numel()


@pytest.mark.parametrize("name", ["16 bit", "nf4"])
def test_at_least_14_percent_fewer_bytes_are_saved_in_a_step_and_in_its_forecast(base, name):
    wanted = settings(base, **EXACT[name])
    real, cast = saved_bytes(wanted, adapted(wanted)), saved_bytes(wanted, with_pefts_cast(adapted(wanted)))
    assert real <= 0.86 * cast
    with forecast_model(wanted) as model:
        assert saved_bytes(wanted, model) <= 0.86 * saved_bytes(wanted, with_pefts_cast(model))


@pytest.mark.parametrize("name", KEPT_CAST)
def test_pefts_cast_stays_where_results_would_change(base, name):
    wanted = settings(base, **KEPT_CAST[name])
    model = adapted(wanted)
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert layers and not any("_cast_input_dtype" in vars(layer) for layer in layers)
    expected = step(model, wanted)[0]
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    model.zero_grad()
    assert step(model, wanted)[0] != expected


def test_outside_autocast_a_16_bit_model_still_answers(base):
    model = adapted(settings(base)).eval()
    ids = batch(0)["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, with_pefts_cast(model)(input_ids=ids).logits)
