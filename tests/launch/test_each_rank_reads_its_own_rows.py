"""FSDP2 with 4-bit weights: no process ever holds the model, and together they compute what one computes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000), pytest.mark.usefixtures("warm_processes")]


def two_processes(model, out):
    script = str(Path(__file__).with_name("own_rows_process.py"))
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, script, str(model), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_two_processes_compute_what_one_computes_at_the_first_start_and_the_second(tmp_path):
    for start in ("first", "second"):
        seen = two_processes("tiny", tmp_path)
        assert sum(len(each["said"]) for each in seen) == (start == "first")  # one of them quantises
        for each in seen:
            assert each["split_parameters"] == each["parameters"]
            assert each["loss"] == pytest.approx(each["whole_loss"], rel=1e-6)
            assert each["norm"] == pytest.approx(each["whole_norm"], rel=1e-4)


def test_each_process_takes_less_than_the_model_while_it_is_loaded(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    for _ in ("first start", "second"):
        for each in two_processes(tmp_path / "model", tmp_path):
            assert each["model_bytes"] > 120e6
            # Half is its rows; 0.59 to 0.70 was seen. Who quantises has 14 bytes for each element of a matrix: to 0.73.
            assert each["peak_bytes"] < (0.8 if each["said"] else 0.75) * each["model_bytes"]
            assert each["loss"] == pytest.approx(each["whole_loss"], rel=1e-6)
