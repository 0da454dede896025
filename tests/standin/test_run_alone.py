"""A run that has the GPU for itself: its attention kernels, its segments, and where its steps wait for the GPU."""

import json
import os

import pytest

from finetune.events import RunWarning, Step, read_events

pytestmark = pytest.mark.standin
UNEVEN = [
    "tiny-cpu", "gpu=auto", "dtype=bfloat16", "max_steps=1", "dataset.max_rows=64", "per_device_train_batch_size=4",
    "eval_steps=1", "per_device_eval_batch_size=4", "sample_answers=0",
]  # fmt: skip


def test_padded_rows_take_flash_attention(standin, tmp_path):
    trace = {"STAND_IN_TRACE": str(tmp_path / "trace")}
    standin("rtx-4090").run("cold finetune", "run", *UNEVEN, f"output_dir={tmp_path / 'run'}", environment=trace)
    kernels = {name for path in tmp_path.glob("trace.*") for name in json.loads(path.read_text())["kernels"]}
    assert any("flash_fwd" in name for name in kernels) and any("flash_bwd" in name for name in kernels)
    assert {name for name in kernels if "fmha_cutlass" in name} == set()  # memory-efficient attention, which takes masks
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [event.other_processes_bytes for event in events if isinstance(event, Step)] == [0]
    assert not any("expandable_segments" in event.message for event in events if isinstance(event, RunWarning))


@pytest.mark.slow
def test_a_run_whose_segments_can_not_expand_says_what_it_may_take(standin, tmp_path):
    arguments = ["tiny-cpu", "gpu=auto", "max_steps=1", "dataset.max_rows=16", f"output_dir={tmp_path}/run", "sample_answers=0"]
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    standin("rtx-4090").run("finetune", "run", *arguments, environment=environment)
    messages = [event.message for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, RunWarning)]
    assert any("ignores expandable_segments" in message for message in messages)


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
SHORT_RUN = [
    "tiny-cpu", "gpu=auto", "dtype=bfloat16", f"max_steps={STEPS}", "dataset.max_rows=64", "per_device_train_batch_size=2",
    "effective_batch_size=4", "eval_steps=0", "save_steps=0", "sample_answers=0",
]  # fmt: skip


@pytest.mark.slow
def test_a_step_waits_for_the_gpu_in_the_head_and_for_what_it_logs_only(standin, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    machine, output = standin("rtx-4090"), tmp_path / "synchronisations.json"
    path = os.pathsep.join([str(tmp_path), machine.environment["PYTHONPATH"]])
    environment = {"PYTHONPATH": path, "SYNCHRONISATIONS": str(output)}
    machine.run("finetune", "run", *SHORT_RUN, f"output_dir={tmp_path / 'run'}", environment=environment)
    callers = {name: count for name, count in json.loads(output.read_text()).items() if count >= STEPS}
    assert callers == {
        "_fused_forward": 2 * MICRO_BATCHES,  # TRL's head computes trained tokens only: hidden states and labels are selected
        "_engine_run_backward": 2 * MICRO_BATCHES,  # the backward passes of these two
        "_maybe_log_save_evaluate": 2 * STEPS,  # loss and gradient norm
        "take_counts": STEPS,
    }
