"""FSDP2 really shards a 4-bit model over two ranks, with the results of the full model."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000), pytest.mark.usefixtures("warm_processes")]


def two_processes(strategy, folder):
    script = str(Path(__file__).with_name("fsdp_process.py"))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
    ]
    process = subprocess.run([*command, script, strategy, str(folder)], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_stored_for_fsdp_every_parameter_is_split_and_the_loss_is_the_same(tmp_path):
    for report in two_processes("fsdp", tmp_path):
        assert report["sharded_parameters"] == report["parameters"]
        assert report["sharded_loss"] == pytest.approx(report["full_loss"], rel=1e-6)
        assert math.isfinite(report["gradient_norm"]) and report["gradient_norm"] > 0


def test_each_process_keeps_and_gathers_what_the_forecast_says(tmp_path):
    from finetune.memory.shard_units import units_of
    from finetune.memory.sharding import gathered_by_fsdp
    from finetune.model.configuration import read_config
    from finetune.recipe import load_recipe
    from finetune.settings import resolved

    recipe = load_recipe(
        "tiny-cpu", ["gpu=auto", "per_device_train_batch_size=1", "launch.num_processes=2", "launch.strategy=fsdp"]
    )
    units = units_of(read_config(recipe), resolved(recipe, attn_implementation="sdpa", load_in_8bit=False, dtype="bfloat16"))
    shards = [
        (-(-parameter.rows // 2) * parameter.row_bytes, parameter.trained) for unit in units for parameter in unit.parameters
    ]
    unit_bytes = {
        unit.name: sum(-(-parameter.rows // 2) * 2 * parameter.row_bytes for parameter in unit.parameters) for unit in units
    }
    # a layer, its all-gather buffer, the tied embedding, the last norm; the rule adds a third layer (another stream's buffers)
    gathered = 2 * unit_bytes["layers.0"] + unit_bytes["head"] + unit_bytes["rest"]
    for report in two_processes("fsdp", tmp_path):
        assert report["sharded_layers"] == 5
        assert report["local_bytes"] == sum(shard_bytes for shard_bytes, _ in shards)
        assert report["trained_bytes"] == sum(shard_bytes for shard_bytes, trained in shards if trained)
        assert report["gathered_bytes"] == gathered <= gathered_by_fsdp(units, 2) <= 2 * gathered


def test_stored_as_usual_the_4_bit_weights_would_stay_whole(tmp_path):
    for report in two_processes("ddp", tmp_path):
        assert report["sharded_parameters"] == report["parameters"] - 35  # 5 layers of 7 quantised matrices
