"""benchmarks/gpu end to end on the CPU with the bundled model, and what its parts make."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import random_model, report
from benchmarks.gpu.cells import CELLS, FINISHED
from benchmarks.gpu.measure import NEEDS_CARD

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


@pytest.fixture(scope="module")
def lines(warm_python, tmp_path_factory):
    """The results of one call, by cell."""
    results = tmp_path_factory.mktemp("gpu") / "results.jsonl"
    command = [warm_python, "-m", "benchmarks.gpu.measure", "--gpu", "cpu", "--model", "tiny", "--minutes", "15"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run([*command, "--results", results], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return {line["cell"]: line for line in map(json.loads, results.read_text().splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_each_cell_has_a_forecast_and_the_memory_of_each_phase_or_a_reason(lines, cell):
    line = lines[cell.name]
    if cell.card_only:
        assert (line["state"], line["error"]) == ("skipped", NEEDS_CARD)
    else:
        assert (line["state"], line["error"]) == (FINISHED, None)
        assert line["forecast"]["allocated_bytes"] > 0 and line["measured"]["tokens_per_s"] > 0 and len(line["losses"]) == 3
        assert line["phases"].keys() == {"load", "train", "evaluate", "save"}
        assert all(peaks["process_peak_rss_bytes"] > 2**20 for peaks in line["phases"].values())


def test_rows_have_half_of_the_longest_length_to_all_of_it_and_a_model_is_complete_and_random(tmp_path):
    from transformers import AutoTokenizer

    from finetune.bundled import model_path

    random_model.write_rows(tmp_path / "rows.jsonl", 64, 8)
    tokenizer = AutoTokenizer.from_pretrained(str(model_path("tiny")))
    texts = [json.loads(line)["text"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in texts]  # and EOS
    assert max(lengths) == 64 and min(lengths) >= 32 and len(set(lengths)) > 4
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from finetune.bundled import model_path

    random_model.make_model(str(Path(model_path("tiny")) / "config.json"), tmp_path / "model", layers=2)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    matrices = [tensor for tensor in tensors.values() if tensor.dim() == 2]
    assert all(0.01 < tensor.float().std() < 0.03 for tensor in matrices)
    assert not any(torch.equal(matrix, following) for matrix, following in zip(matrices, matrices[1:], strict=False))
    _, loading_info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not loading_info["missing_keys"] and not loading_info["unexpected_keys"]


def test_a_cell_without_a_result_on_a_card_is_not_measured_and_the_newest_result_has_its_error():
    on_a_cpu = {"cell": "nf4-keep", "card": None, "state": "finished", "forecast": {"allocated_bytes": GIB}}
    assert {row[-1] for row in report.table([on_a_cpu])} == {"not measured"}
    assert report.summary([on_a_cpu])["runs"] == 0
    old, new = (
        {
            "cell": "nf4-keep", "card": "A", "state": "finished", "as_expected": True,
            "forecast": {"allocated_bytes": GIB, "peak_low_bytes": GIB, "peak_high_bytes": 2 * GIB},
            "measured": {"allocated_bytes": measured, "tokens_per_s": 1234.0},
        }
        for measured in (2 * GIB, 1.25 * GIB)
    )  # fmt: skip
    row = report.table([old, new])[[cell.name for cell in CELLS].index("nf4-keep")]
    assert row == [
        "NF4, nothing recomputed", "1.000", "1.250", "-20.00 %", "-", "1.000 to 2.000", "-", "1,234", "-", "finished",
    ]  # fmt: skip
    assert report.summary([old, new]) == {"cards": ["A"], "runs": 1, "mean": "20.00 %", "worst": "-20.00 %"}
