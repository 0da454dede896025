"""FSDP2 with 4-bit weights: no process ever has the whole model, and together they have the results of one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def two_processes(model, folder):
    script = str(Path(__file__).with_name("own_rows_process.py"))
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, script, str(model), str(folder)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_two_processes_have_the_results_of_one_and_each_takes_less_than_the_model_while_it_is_loaded(
    tmp_path, warm_python, monkeypatch
):
    monkeypatch.setenv("PYTHON_EXEC", warm_python)
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=1024, intermediate_size=1024, num_hidden_layers=44, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    for report in two_processes(tmp_path / "model", tmp_path):
        assert report["sharded_parameters"] == report["parameters"]
        assert report["model_bytes"] > 120e6
        # half are its rows; quantising takes 14 bytes for each element of a matrix
        assert report["peak_bytes"] < 0.8 * report["model_bytes"]
        assert report["loss"] == pytest.approx(report["full_loss"], rel=1e-6)
        assert report["norm"] == pytest.approx(report["full_norm"], rel=1e-4)
