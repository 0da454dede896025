"""Merging tensor by tensor equals PEFT's merge for every form of stored weights; killed at any moment, it leaves nothing."""

import gc
import json
import os

import pytest
import small_models
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from small_models import store_as_fp8, store_as_mxfp4
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from finetune.errors import RecipeError
from finetune.export import merge as merging
from finetune.export.merge import merge, merged_tensors, stored_tensors, with_adapter, write_merged, write_tensors
from finetune.model.weights import INDEX, check_weights
from finetune.run.directory import RunDirectory

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "head_dim": 8}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.arange(24).reshape(2, 12)
CASES = {
    "llama": ("llama", {}, {"target_modules": LINEAR}),
    "llama in bfloat16": ("llama", {"dtype": torch.bfloat16}, {"target_modules": LINEAR}),
    "rank-stabilised": ("llama", {}, {"target_modules": LINEAR, "use_rslora": True}),
    "output layer": ("llama", {"tie_word_embeddings": False}, {"target_modules": [*LINEAR, "lm_head"]}),
    "embedding": ("llama", {"tie_word_embeddings": False}, {"target_modules": ["embed_tokens", "q_proj"]}),
    "one matrix for keys and values": ("phi3", {"pad_token_id": 0}, {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "transposed": ("gpt2", {"n_layer": 2, "n_head": 4, "n_embd": 32}, {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "a router": (
        "gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
        {"target_modules": ["q_proj"], "target_parameters": ["router.weight"]},
    ),
    "experts stored one by one": (
        "qwen3_moe", MIXTURE,
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
}  # fmt: skip


def save_model_and_adapter(folder, case):
    """The folders of a random model in several files, and of an adapter with values that matter."""
    model_type, sizes, lora_options = CASES[case]
    torch.manual_seed(0)
    sizes = dict(sizes)
    dtype = sizes.pop("dtype", torch.float32)
    config = AutoConfig.for_model(model_type, **{**SMALL, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder / "base", max_shard_size="20KB")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), LoraConfig(r=4, lora_alpha=8, **lora_options))
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "lora_" in name:
                values.normal_(0, 0.2)
    model.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


def merge_by_shards(base, adapter, target, **options):
    """Returns the names of the tensors that the adapter changes."""
    target.mkdir()
    stored = stored_tensors(base)
    merged = merged_tensors(with_adapter(AutoModelForCausalLM.from_pretrained(base, device_map={"": "meta"}), adapter), stored)
    write_tensors(merged, target, **options)
    (target / "config.json").write_bytes((base / "config.json").read_bytes())
    return {tensor.name for tensor, before in zip(merged, stored, strict=True) if tensor is not before}


def tensors_of(folder):
    return {name: values for path in sorted(folder.glob("*.safetensors")) for name, values in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_merged_files_give_the_logits_of_pefts_merge(tmp_path, case):
    base, adapter = save_model_and_adapter(tmp_path, case)
    changed = merge_by_shards(base, adapter, tmp_path / "merged")
    reference = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    tuned = reference(IDS).logits
    reference = reference.merge_and_unload(safe_merge=True).eval()
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(reloaded.eval()(IDS).logits, reference(IDS).logits)
        tolerance = {"rtol": 1e-4, "atol": 1e-4} if reloaded.dtype == torch.float32 else {"rtol": 0.1, "atol": 0.2}
        torch.testing.assert_close(reloaded(IDS).logits, tuned, **tolerance)
        assert (AutoModelForCausalLM.from_pretrained(base).eval()(IDS).logits - tuned).abs().max() > 0.05
    before, after = tensors_of(base), tensors_of(tmp_path / "merged")
    assert {name for name in before if not torch.equal(before[name], after[name])} == changed
    assert {name: values.dtype for name, values in before.items()} == {name: values.dtype for name, values in after.items()}


def test_files_are_split_like_the_base_or_at_the_given_size(tmp_path):
    base, adapter = save_model_and_adapter(tmp_path, "llama")
    merge_by_shards(base, adapter, tmp_path / "same")
    names = sorted(path.name for path in base.glob("model*.safetensors"))
    assert len(names) > 2 and names == sorted(path.name for path in (tmp_path / "same").glob("*.safetensors"))
    maps = [json.loads((folder / INDEX).read_text())["weight_map"] for folder in (base, tmp_path / "same")]
    assert maps[0] == maps[1]
    merge_by_shards(base, adapter, tmp_path / "small", max_bytes=9000)
    sizes = [[tensor.nbytes for tensor in load_file(path).values()] for path in (tmp_path / "small").glob("*.safetensors")]
    assert all(sum(tensor_sizes) <= 9000 or len(tensor_sizes) == 1 for tensor_sizes in sizes) and len(sizes) > len(names)
    merge_by_shards(base, adapter, tmp_path / "one", max_bytes=10**9)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["config.json", "model.safetensors"]
    expected = tensors_of(tmp_path / "same")
    for folder in ("small", "one"):
        assert all(torch.equal(values, expected[name]) for name, values in tensors_of(tmp_path / folder).items())
        AutoModelForCausalLM.from_pretrained(tmp_path / folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "sizes", "store_quantised", "lora_options"),
    [
        ("llama", {}, store_as_fp8, {"target_modules": ["q_proj", "down_proj"]}),
        ("gpt_oss", {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, store_as_mxfp4,
         {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
        ("llama", {"tie_word_embeddings": True}, lambda folder: None, {"target_modules": ["embed_tokens", "q_proj"]}),
        ("llama", {}, lambda folder: None, {"target_modules": LINEAR, "use_dora": True}),
    ],
    ids=["fp8", "mxfp4", "tied", "DoRA"],
)  # fmt: skip
def test_what_is_stored_otherwise_is_merged_in_memory_as_peft_does(
    tmp_path, monkeypatch, model_type, sizes, store_quantised, lora_options
):
    torch.manual_seed(0)
    base, adapter, target = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    config = AutoConfig.for_model(model_type, **{**SMALL, **sizes})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(base)
    store_quantised(base)
    settings = small_models.settings(base, attn_implementation="eager")
    model = get_peft_model(small_models.load(settings), LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **lora_options))
    model.save_pretrained(adapter)
    monkeypatch.setattr(
        "finetune.export.merge.read_tokenizer", lambda *_: PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
    )
    write_merged(settings, adapter, target, None, lambda _: None)
    merged, info = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(merged.eval()(IDS).logits, model.merge_and_unload(safe_merge=True).eval()(IDS).logits)


def test_values_that_are_not_finite_and_files_cut_short_are_refused(tmp_path):
    base, adapter = save_model_and_adapter(tmp_path, "llama")
    path = max(base.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content, tensors = path.read_bytes(), stored_tensors(base)
    path.write_bytes(content[:-100])
    with pytest.raises(RecipeError, match="is truncated"):
        write_tensors(tensors, tmp_path)
    path.write_bytes(content)
    values = load_file(adapter / "adapter_model.safetensors")
    next(iter(values.values()))[0, 0] = torch.inf
    save_file(values, adapter / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match="not finite"):
        merge_by_shards(base, adapter, tmp_path / "infinite")


@pytest.fixture
def run(home, kept_run):
    return RunDirectory(kept_run(home))


@pytest.mark.slow
def test_a_merge_killed_at_ten_moments_leaves_nothing_that_looks_finished(run, home):
    gc.freeze()
    for moment in range(10):
        child = os.fork()
        if not child:
            remaining, read = [moment * 5], merging._read

            def counted(function, remaining=remaining):
                def call(*arguments):
                    remaining[0] -= 1
                    if remaining[0] < 0:
                        os._exit(9)
                    return function(*arguments)

                return call

            merging._read = counted(read)
            merge(run, home / "merged")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert not (home / "merged").exists()
        leftovers = home / ".merged"
        assert not list(leftovers.glob("*.json")), "without config.json nothing loads what was written"
    check_weights(merge(run, home / "merged"))
    assert not (home / ".merged").exists()
    assert all((path.stat().st_mode & 0o044) == 0o044 for path in (home / "merged").iterdir())


@pytest.mark.slow
def test_the_size_of_files_is_respected_and_a_wrong_one_refused(run, home, finetune):
    code, shown = finetune("merge", run.path, "--max-shard-size", "1MiB", "--output", "merged")
    assert code == 0, shown
    paths = sorted((home / "merged").glob("model-*.safetensors"))
    assert len(paths) > 2 and sum(len(load_file(path)) for path in paths) == 47
    for size, message in {"much": "is not a size", "3": "less than 1 MiB"}.items():
        code, shown = finetune("merge", run.path, "--max-shard-size", size, "--output", "other")
        assert code == 2 and message in shown
