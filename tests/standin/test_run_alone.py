"""A run that has the GPU for itself: padded rows take flash attention; segments that can't expand are reported."""

import json

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
