"""A training step waits for the GPU only where the host needs a number: counted by who asks, with torch's own debug mode."""

import json
import os

import pytest

pytestmark = [pytest.mark.standin, pytest.mark.slow]

SITE_CUSTOMIZE = """
import sys
if "finetune.run.worker" in sys.orig_argv:
    import collections, json, os, traceback, warnings
    import torch
    from finetune.run.training import RunTrainer

    train, callers = RunTrainer.train, collections.Counter()

    def count(message, *_, **__):
        if "synchroniz" in str(message):
            callers[traceback.extract_stack()[-3].name] += 1

    def counted(self, *arguments, **named):
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        result = train(self, *arguments, **named)
        torch.cuda.set_sync_debug_mode("default")
        with open(os.environ["SYNCHRONISATIONS"], "w") as file:
            json.dump(callers, file)
        return result

    RunTrainer.train = counted
"""
STEPS, MICRO_BATCHES = 6, 12
RUN = [
    "tiny-cpu", "gpu=auto", "dtype=bfloat16", f"max_steps={STEPS}", "dataset.max_rows=64", "per_device_train_batch_size=2",
    "effective_batch_size=4", "eval_steps=0", "save_steps=0", "sample_answers=0",
]  # fmt: skip


def test_a_step_waits_for_the_gpu_in_the_head_and_for_what_it_logs_only(standin, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    machine, output = standin("rtx-4090"), tmp_path / "synchronisations.json"
    path = os.pathsep.join([str(tmp_path), machine.environment["PYTHONPATH"]])
    environment = {"PYTHONPATH": path, "SYNCHRONISATIONS": str(output)}
    machine.run("finetune", "run", *RUN, f"output_dir={tmp_path / 'run'}", environment=environment)
    callers = {name: count for name, count in json.loads(output.read_text()).items() if count >= STEPS}
    assert callers == {
        "_fused_forward": 2 * MICRO_BATCHES,  # TRL's head computes trained tokens only: hidden states and labels are selected
        "_engine_run_backward": 2 * MICRO_BATCHES,  # the backward passes of these two
        "_maybe_log_save_evaluate": 2 * STEPS,  # loss and gradient norm
        "take_counts": STEPS,
    }
