"""A run that has the GPU for itself: padded rows take flash attention; segments that can't expand are reported;
`record_memory_history` writes files of torch's own, of a living run and of one that has ended.
"""

import json
import pickle
import time
from pathlib import Path

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


def test_a_living_run_writes_its_history_when_asked_and_leaves_the_peaks_and_the_last(standin, tmp_path):
    machine, run = standin("rtx-4090"), tmp_path / "run"
    fixed = ["gpu=auto", "max_steps=2000", "sample_answers=0", "save_steps=0", "eval_steps=0", "lora_r=4"]
    machine.run("finetune", "run", "tiny-cpu", *fixed, "record_memory_history=true", f"output_dir={run}", "--detach")
    while '"kind": "step"' not in ((run / "events.jsonl").read_text() if (run / "events.jsonl").exists() else ""):
        time.sleep(0.1)  # the test's time limit ends this
    histories = json.loads(machine.run("finetune", "runs", "show", str(run), "--memory", "--json").stdout)["histories"]
    assert "now" in histories
    machine.run("finetune", "pause", str(run))
    report = json.loads(machine.run("finetune", "runs", "show", str(run), "--memory", "--json").stdout)
    assert set(report["histories"]) == {"peak", "now", "end"}, (run / "events.jsonl").read_text()[-2000:]
    assert report["history"] == report["histories"]["end"]
    for path in report["histories"].values():
        (traces,) = pickle.loads(Path(path).read_bytes())["device_traces"]
        assert {"alloc", "free_completed"} <= {entry["action"] for entry in traces}
