"""A plain TRL script on a GPU: `finetune.MemoryCallback` beside what torch's own allocator took."""

import json

import pytest

from finetune.bundled import model_path
from finetune.model.names import catalogue
from standin_gpu.sparse_model import write_sparse_model

pytestmark = [pytest.mark.standin, pytest.mark.slow]

#: Arguments: the model's path, the quantisation, fields of SFTConfig, tokens of the rows.
SCRIPT = """
import json, sys
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
import finetune

path, quantised, fields, tokens = sys.argv[1], sys.argv[2] == "NF4", json.loads(sys.argv[3]), int(sys.argv[4])
quantisation = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
) if quantised else None
loading = {"dtype": torch.bfloat16, "quantization_config": quantisation, "device_map": {"": 0}}
model = AutoModelForCausalLM.from_pretrained(path, **loading)
trainer = SFTTrainer(
    model=model, train_dataset=Dataset.from_dict({"input_ids": [list(range(5, 5 + tokens))] * 16}),
    args=SFTConfig(output_dir="unused", max_steps=3, report_to="none", save_strategy="no", max_length=None, **fields),
    peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    processing_class=AutoTokenizer.from_pretrained(path),
)
memory = finetune.MemoryCallback(trainer)
trainer.add_callback(memory)
trainer.train()
upper, reserved = memory.fit.forecast.peak_high_bytes, torch.cuda.max_memory_reserved()
print(json.dumps({"error": memory.error, "verdict": memory.fit.verdict, "upper": upper, "reserved": reserved}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An 8B model of two layers, in sparse files."""
    path = tmp_path_factory.mktemp("model")
    write_sparse_model(path, {**catalogue()["Qwen/Qwen3-8B"], "num_hidden_layers": 2}, model_path("tiny"))
    return path


@pytest.mark.parametrize(
    ("quantised", "fields"),
    [
        pytest.param("NF4", {"per_device_train_batch_size": 2, "gradient_checkpointing": False}, marks=pytest.mark.exhaustive),
        ("NF4", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "optim": "paged_adamw_8bit"}),
        ("16 bit", {"per_device_train_batch_size": 1, "gradient_checkpointing": False}),
    ],
)
def test_a_plain_trainer_allocates_what_was_forecast(standin, model, quantised, fields):
    result = standin("rtx-4090").python(SCRIPT, model, quantised, json.dumps(fields), 512)
    taken = json.loads(result.stdout.splitlines()[-1])
    assert abs(taken["error"]) < 0.005, taken
    assert taken["verdict"] == "fits" and taken["reserved"] < taken["upper"]
    assert "finetune: forecast fits" in result.stderr and "finetune: allocated" in result.stderr
