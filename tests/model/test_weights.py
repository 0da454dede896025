"""Weights and adapters that are damaged, truncated or of another model are refused before a library reads them."""

import hashlib
import json
import pickle
import re
import shutil

import pytest
import small_models
import torch
from safetensors.torch import load_file, save_file
from small_models import SMALL, settings
from transformers import AutoModelForCausalLM

from finetune.bundled import model_path
from finetune.errors import RecipeError
from finetune.files import sha256_in_subprocess
from finetune.model.transformers_config import config_from
from finetune.model.weights import adapter_problems, check_weights


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(model_path("tiny"), tmp_path / "model")


def load(folder, **more):
    return small_models.load(settings(folder, dtype="float32", **more))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (lambda whole: whole[: len(whole) // 2], "truncated"),
        (lambda whole: whole[:100], "truncated"),
        (lambda whole: b"", "truncated"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs"),
        (lambda whole: b"\x10" + bytes(7) + b"not json at all!" + whole, "can't be read"),
    ],
)
def test_a_damaged_file_is_named(folder, content, problem):
    path = folder / "model.safetensors"
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(RecipeError, match=problem) as caught:
        check_weights(folder)
    assert str(path) in caught.value.problems[0]


def test_a_missing_file_of_several_is_named_and_a_folder_without_weights_says_so(folder):
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "two.safetensors"}})
    )
    with pytest.raises(RecipeError, match="two.safetensors: is missing"):
        check_weights(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(RecipeError, match="index.json can't be read"):
        check_weights(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(RecipeError, match="no weights.*safetensors"):
        load(folder)


@pytest.mark.parametrize("more", [{}, {"load_in_4bit": True}])
def test_a_tensor_that_the_weights_lack_is_not_made_up(folder, more):
    tensors = load_file(folder / "model.safetensors")
    tensors["other.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    check_weights(folder)
    with pytest.raises(RecipeError, match="different models") as caught:
        load(folder, **more)
    assert "model_name_or_path" in caught.value.problems[0]


@pytest.mark.parametrize(
    ("values", "problem"),
    [({"num_hidden_layers": 2}, "has 2 layers, the weights have more"), ({"vocab_size": 10}, "can't be loaded")],
)
def test_weights_that_the_configuration_does_not_describe_are_refused(folder, values, problem):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    with pytest.raises(RecipeError, match=problem):
        load(folder)


@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize(
    "values", [{"model_type": "llama", "tie_word_embeddings": True}, {"model_type": "mixtral", "num_local_experts": 4}]
)
def test_what_transformers_ties_or_stores_under_other_names_is_not_missed(tmp_path, values, four_bit):
    AutoModelForCausalLM.from_config(config_from({**SMALL, **values}, settings())).save_pretrained(tmp_path)
    check_weights(tmp_path)
    load(tmp_path, load_in_4bit=four_bit)


def test_a_large_file_is_hashed_by_another_process(tmp_path, monkeypatch):
    path = tmp_path / "large file.safetensors"
    with path.open("wb") as file:
        file.truncate(2**26)
    monkeypatch.setattr("finetune.files.sha256_of", lambda path: "in this process")
    assert sha256_in_subprocess(path) == hashlib.sha256(bytes(2**26)).hexdigest()
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    assert sha256_in_subprocess(path) == "in this process"


CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def adapter(tmp_path):
    def write(tensor=None, **changes):
        (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
        save_file({NAME: torch.zeros(4, 8) if tensor is None else tensor}, tmp_path / "adapter_model.safetensors")
        return tmp_path

    return write


@pytest.mark.parametrize("changes", [
    {}, {"r": 2}, {"rank_pattern": {"k_proj": 8}}, {"target_modules": "q_proj|k_proj"}, {"lora_alpha": -1.5},
], ids=str)  # fmt: skip
def test_an_adapter_of_peft_has_no_problem(adapter, changes):
    assert adapter_problems(adapter(**changes)) == []


@pytest.mark.parametrize(("changes", "problem"), [
    ({"r": 10**9}, "r is 1000000000, not between 1 and 8,192"), ({"r": 0}, "r is 0"), ({"r": True}, "r is True"),
    ({"r": 16}, "has 4 rows, not a multiple of the rank 16"), ({"lora_alpha": 1e300}, "lora_alpha is 1e.300"),
    ({"lora_alpha": "x"}, "lora_alpha is x"), ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    ({"target_modules": "((("}, "is no regular expression"), ({"tensor": torch.zeros(4, 8, dtype=torch.int8)}, "is I8, not"),
], ids=str)  # fmt: skip
def test_what_no_adapter_has_is_named(adapter, changes, problem):
    (line,) = adapter_problems(adapter(**changes))
    assert re.search(problem, line)


def test_weights_are_read_from_safetensors_only(adapter):
    folder = adapter()
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({}))
    assert adapter_problems(folder) == ["adapter_model.safetensors is missing"]


@pytest.mark.parametrize("keep", [0, 4, 50, -1])
def test_a_truncated_file_is_named(adapter, keep):
    path = adapter() / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "truncated" in adapter_problems(path.parent)[0]
