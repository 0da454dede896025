"""Compiled decoder layers: one graph each, no graph breaks, and the losses of the eager run but for rounding."""

import pytest
import torch
import torch._dynamo.utils as dynamo
from tiny_training import losses, plain_losses, settings_for

pytestmark = [pytest.mark.slow, pytest.mark.compiler]

FORMS = {
    "plain": {},
    "every-2": {"activation_checkpointing": True, "activation_checkpointing_every_n_layers": 2},
    "offload": {"activation_checkpointing": "offload"},
    "selective": {"activation_checkpointing": "selective"},
    "activation-offloading": {"activation_offloading": True},
}


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[] if form in ("every-2", "selective") else pytest.mark.exhaustive) for form in FORMS]
)
def test_layers_compile_without_graph_breaks_and_train_alike(base, form):
    torch._dynamo.reset()
    dynamo.counters.clear()
    settings = settings_for(base, dtype="bfloat16", load_in_4bit=True, torch_compile=True, **FORMS[form])
    assert losses(settings) == pytest.approx(plain_losses(base, "nf4"), rel=1e-3)
    assert dynamo.counters["stats"]["unique_graphs"] >= 1
    assert not dynamo.counters["graph_break"]
