"""Rows of new tokens in a model: their first values, which of them are trained, and the same after merging."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from small_models import load, on_meta
from small_models import settings as plain_settings
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from finetune.compat.trl import add_loss
from finetune.data.tokenizer import load_tokenizer
from finetune.errors import RecipeError
from finetune.export.merge import stored_tensors, write_merged
from finetune.model.adapters import attach_adapters, embedding_rows, grow_vocabulary, trainable_parameters

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
WORDS = {"<pad>": 0, "</s>": 1, "support": 2, "ticket": 3, "other": 4}


def save(folder, *, rows=5, **sizes):
    """A small model with its tokenizer of five words, and this many rows."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=rows, **SMALL, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def settings(name):
    """Of a run with two new tokens."""
    tokens = {"new_tokens": {"<|t|>": "support ticket", "<|u|>": ""}, "trained_embedding_rows": [5, 7]}
    return plain_settings(name, dtype="float32", **tokens)


def adapted(wanted):
    return attach_adapters(load(wanted), wanted, load_tokenizer(wanted))


def base_and_grown(wanted):
    before, model = AutoModelForCausalLM.from_pretrained(wanted.model_name_or_path), load(wanted)
    grow_vocabulary(model, wanted, load_tokenizer(wanted))
    return before, model


@pytest.mark.parametrize(("tied", "padded"), [(True, 5), (False, 5), (True, 64)])
def test_rows_begin_as_the_mean_of_what_they_stand_for(tmp_path, tied, padded):
    before, grown = base_and_grown(settings(save(tmp_path, tie_word_embeddings=tied, rows=padded)))
    for old, new in zip(tables(before), tables(grown), strict=True):
        assert len(new) == max(padded, 7)
        assert torch.equal(new[:5], old[:5])
        assert torch.equal(new[7:], old[7:])
        torch.testing.assert_close(new[5], (old[2] + old[3]) / 2)
        torch.testing.assert_close(new[6], old[:5].mean(dim=0))
    assert (tables(grown)[0] is tables(grown)[1]) == tied


def tables(model):
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_changes_the_rows_of_new_tokens_only(tmp_path, tied):
    wanted = settings(save(tmp_path, tie_word_embeddings=tied))
    model = adapted(wanted)
    before = [table.clone() for table in tables(model)]
    add_loss(model)
    ids = torch.tensor([[2, 5, 3, 5, 6]])
    output = model(input_ids=ids, labels=ids, fused_lm_head=True, use_cache=False)
    output.loss.backward()
    rows = [values for name, values in trainable_parameters(model) if "trainable_tokens" in name]
    assert [values.shape for values in rows] == [(2, 32)] * (1 if tied else 2)
    assert all(values.grad.norm() > 0 for values in rows)
    torch.optim.SGD([values for _, values in trainable_parameters(model)], lr=1.0).step()
    for old, new in zip(before, tables(model), strict=True):
        assert torch.equal(old[:5], new[:5])
        assert not torch.equal(old[5:], new[5:])


@pytest.mark.parametrize(("tied", "padded"), [(True, 5), (False, 5), (False, 64)])
def test_the_merged_model_equals_pefts_merge(tmp_path, tied, padded):
    wanted = settings(save(tmp_path / "base", tie_word_embeddings=tied, rows=padded))
    model = adapted(wanted)
    with torch.no_grad():
        for _, values in trainable_parameters(model):
            values.normal_(0, 0.2)
    model.save_pretrained(tmp_path / "adapter")
    load_tokenizer(wanted).save_pretrained(tmp_path / "adapter")
    write_merged(wanted, tmp_path / "adapter", tmp_path / "merged", None, lambda _: None)
    _, whole = base_and_grown(wanted)
    expected = PeftModel.from_pretrained(whole, tmp_path / "adapter").merge_and_unload().state_dict()
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert set(merged) == {stored.name for stored in stored_tensors(tmp_path / "base")}
    for name, values in merged.items():
        torch.testing.assert_close(values, expected[name], msg=name)
    assert AutoConfig.from_pretrained(tmp_path / "merged").vocab_size == max(padded, 7)


def test_the_adapter_has_the_rows_and_not_the_tables(tmp_path):
    wanted = settings(save(tmp_path / "base", tie_word_embeddings=False))
    model = adapted(wanted)
    model.save_pretrained(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert [values.shape for name, values in stored.items() if "lora_" not in name] == [(2, 32)] * 2
    indices = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["trainable_token_indices"]
    assert indices == {"model.embed_tokens": [5, 6], "lm_head": [5, 6]}
    assert embedding_rows(model) == 7


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "phi", "vocab_size": 5, **SMALL}, "can't be trained alone"),  # its output layer has a bias
        ({"model_type": "gemma3n_text", "vocab_size": 5, "vocab_size_per_layer_input": 5, "num_kv_shared_layers": 0, **SMALL},
         "several embedding tables"),
    ],
)  # fmt: skip
def test_models_that_new_tokens_do_not_fit_are_refused(values, reason):
    wanted = settings("some/model")
    with pytest.raises(RecipeError, match=reason):
        attach_adapters(on_meta(wanted, values), wanted)
