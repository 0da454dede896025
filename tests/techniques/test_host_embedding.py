"""An input embedding in host memory: the same numbers, and no table on the card."""

import copy

import pytest
import torch
from lean_models import gradients, model_of, tokens
from tiny_training import BASES, adapted, settings_for

from finetune.errors import RecipeError
from finetune.layers.layer_offloading import offload_embedding, offloadable_embedding
from finetune.model.techniques import apply_techniques


def test_gradients_and_answers_are_the_same_to_the_bit():
    model = model_of("llama")
    before, answer = gradients(model, tokens()), model(input_ids=tokens()).logits
    apply_techniques(model, settings_for("none", offload_embeddings=True))
    assert torch.equal(gradients(model, tokens()), before) and torch.equal(model(input_ids=tokens()).logits, answer)
    apply_techniques(model, settings_for("none", activation_checkpointing=True))
    assert torch.equal(gradients(model, tokens()), before)
    assert torch.equal(gradients(copy.deepcopy(model), tokens()), before)


def test_the_table_is_no_parameter_and_stays_when_the_model_moves():
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
