"""An adapter of any content is refused by its header and configuration, before a library reads it or reserves memory for it."""

import json
import pickle
import re

import pytest
import torch
from safetensors.torch import save_file

from finetune.model.weights import adapter_problems

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
