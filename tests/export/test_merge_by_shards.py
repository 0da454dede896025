"""Merging tensor by tensor gives what PEFT's merge of the whole model gives, for every way in which weights are stored."""

import json
import os
import stat

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.errors import RecipeError
from finetune.export.shards import INDEX, Changes, NotByShards, stored_tensors, with_adapter, write_shards

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "head_dim": 8}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.arange(24).reshape(2, 12)
CASES = {
    "llama": ("llama", {}, {"target_modules": LINEAR}),
    "llama in bfloat16": ("llama", {"dtype": torch.bfloat16}, {"target_modules": LINEAR}),
    "rank-stabilised": ("llama", {}, {"target_modules": LINEAR, "use_rslora": True}),
    "DoRA": ("llama", {}, {"target_modules": LINEAR, "use_dora": True}),
    "output layer": ("llama", {"tie_word_embeddings": False}, {"target_modules": [*LINEAR, "lm_head"]}),
    "embedding": ("llama", {"tie_word_embeddings": False}, {"target_modules": ["embed_tokens", "q_proj"]}),
    "one matrix for keys and values": ("phi3", {"pad_token_id": 0}, {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "transposed": ("gpt2", {"n_layer": 2, "n_head": 4, "n_embd": 32}, {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "experts stored one by one": (
        "qwen3_moe", MIXTURE,
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
}  # fmt: skip


def made(folder, case):
    """The folder of a random model in several files, and of an adapter with values that matter."""
    kind, sizes, lora = CASES[case]
    torch.manual_seed(0)
    sizes = dict(sizes)
    dtype = sizes.pop("dtype", torch.float32)
    config = AutoConfig.for_model(kind, **{**SMALL, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder / "base", max_shard_size="20KB")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), LoraConfig(r=4, lora_alpha=8, **lora))
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "lora_" in name:
                values.normal_(0, 0.2)
    model.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


def merged(base, adapter, target, **options):
    target.mkdir()
    empty = AutoModelForCausalLM.from_pretrained(base, device_map={"": "meta"})
    tensors = stored_tensors(base)
    changes = Changes(with_adapter(empty, adapter), tensors)
    options = {"most_bytes": None, "progress": lambda _: None, **options}
    write_shards(tensors, changes, target, **options)
    (target / "config.json").write_bytes((base / "config.json").read_bytes())
    return changes


def tensors_of(folder):
    return {name: values for path in sorted(folder.glob("*.safetensors")) for name, values in load_file(path).items()}


@pytest.mark.parametrize("case", CASES)
def test_the_merged_files_give_the_logits_of_pefts_merge(tmp_path, case):
    base, adapter = made(tmp_path, case)
    changes = merged(base, adapter, tmp_path / "merged")
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    tuned = whole(IDS).logits
    whole = whole.merge_and_unload(safe_merge=True).eval()
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(reloaded.eval()(IDS).logits, whole(IDS).logits)
        exact = {"rtol": 1e-4, "atol": 1e-4} if reloaded.dtype == torch.float32 else {"rtol": 0.1, "atol": 0.2}
        torch.testing.assert_close(reloaded(IDS).logits, tuned, **exact)
        assert (AutoModelForCausalLM.from_pretrained(base).eval()(IDS).logits - tuned).abs().max() > 0.05
    before, after = tensors_of(base), tensors_of(tmp_path / "merged")
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(changes._parameter_of)
    assert {name: values.dtype for name, values in before.items()} == {name: values.dtype for name, values in after.items()}


def test_files_stay_those_of_the_base_or_are_of_the_asked_size(tmp_path):
    base, adapter = made(tmp_path, "llama")
    merged(base, adapter, tmp_path / "same")
    names = sorted(path.name for path in base.glob("model*.safetensors"))
    assert len(names) > 2 and names == sorted(path.name for path in (tmp_path / "same").glob("*.safetensors"))
    maps = [json.loads((folder / INDEX).read_text())["weight_map"] for folder in (base, tmp_path / "same")]
    assert maps[0] == maps[1]
    merged(base, adapter, tmp_path / "small", most_bytes=9000)
    sizes = [[each.nbytes for each in load_file(path).values()] for path in (tmp_path / "small").glob("*.safetensors")]
    assert all(sum(inside) <= 9000 or len(inside) == 1 for inside in sizes) and len(sizes) > len(names)
    merged(base, adapter, tmp_path / "one", most_bytes=10**9)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["config.json", "model.safetensors"]
    wanted = tensors_of(tmp_path / "same")
    for folder in ("small", "one"):
        assert all(torch.equal(values, wanted[name]) for name, values in tensors_of(tmp_path / folder).items())
        AutoModelForCausalLM.from_pretrained(tmp_path / folder)


def test_other_users_can_read_what_is_written(tmp_path):
    base, adapter = made(tmp_path, "llama")
    umask = os.umask(0o022)
    try:
        merged(base, adapter, tmp_path / "merged")
    finally:
        os.umask(umask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "merged").iterdir()} == {0o644}


def test_a_tied_weight_is_left_to_the_whole_merge(tmp_path):
    CASES["tied"] = ("llama", {"tie_word_embeddings": True}, {"target_modules": ["embed_tokens"]})
    base, adapter = made(tmp_path, "tied")
    with pytest.raises(NotByShards, match="tied"):
        merged(base, adapter, tmp_path / "merged")
    assert not list((tmp_path / "merged").iterdir())


def test_values_that_are_not_finite_and_files_cut_short_are_refused(tmp_path):
    base, adapter = made(tmp_path, "llama")
    path = max(base.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    tensors = stored_tensors(base)
    changes = Changes(with_adapter(AutoModelForCausalLM.from_pretrained(base, device_map={"": "meta"}), adapter), tensors)
    path.write_bytes(content[:-100])
    with pytest.raises(RecipeError, match="is truncated"):
        write_shards(tensors, changes, tmp_path, most_bytes=None, progress=lambda _: None)
    path.write_bytes(content)
    values = load_file(adapter / "adapter_model.safetensors")
    next(iter(values.values()))[0, 0] = torch.inf
    from safetensors.torch import save_file

    save_file(values, adapter / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match="not finite"):
        merged(base, adapter, tmp_path / "infinite")
