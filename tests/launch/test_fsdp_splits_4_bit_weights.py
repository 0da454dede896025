"""FSDP2 really shards a 4-bit model over two ranks, and computes what the full model computes."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000), pytest.mark.usefixtures("warm_processes")]


def two_processes(strategy, out):
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
    done = subprocess.run([*command, script, strategy, str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_stored_for_fsdp_every_parameter_is_split_and_the_loss_is_the_same(tmp_path):
    for seen in two_processes("fsdp", tmp_path):
        assert seen["split_parameters"] == seen["parameters"]
        assert seen["split_loss"] == pytest.approx(seen["whole_loss"], rel=1e-6)
        assert math.isfinite(seen["gradient_norm"]) and seen["gradient_norm"] > 0


def test_each_process_keeps_and_gathers_what_the_forecast_says(tmp_path):
    from finetune.forecast.shard_units import units_of
    from finetune.forecast.sharding import gathered_by_fsdp
    from finetune.model.configuration import read_config
    from finetune.recipe import load_recipe, resolved

    recipe = load_recipe(
        "tiny-cpu", ["gpu=auto", "per_device_train_batch_size=1", "launch.num_processes=2", "launch.strategy=fsdp"]
    )
    units = units_of(read_config(recipe), resolved(recipe, attn_implementation="sdpa", load_in_8bit=False, dtype="bfloat16"))
    rows = [(-(-p.rows // 2) * p.row_bytes, p.trained) for unit in units for p in unit.parameters]
    whole = {unit.name: sum(-(-p.rows // 2) * 2 * p.row_bytes for p in unit.parameters) for unit in units}
    # a layer, its all-gather buffer, the tied embedding, the last norm; the rule has a third layer (buffers of another stream)
    together = 2 * whole["layers.0"] + whole["head"] + whole["rest"]
    for seen in two_processes("fsdp", tmp_path):
        assert seen["layers_apart"] == 5
        assert seen["local_bytes"] == sum(size for size, _ in rows)
        assert seen["trained_bytes"] == sum(size for size, trained in rows if trained)
        assert seen["gathered_bytes"] == together <= gathered_by_fsdp(units, 2) <= 2 * together


def test_stored_as_usual_the_4_bit_weights_would_stay_whole(tmp_path):
    for seen in two_processes("ddp", tmp_path):
        assert seen["split_parameters"] == seen["parameters"] - 35  # 5 layers of 7 quantised matrices
