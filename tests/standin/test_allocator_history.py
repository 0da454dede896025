"""record_memory_history: files of torch's own, of a living run and of one that has ended."""

import json
import pickle
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.standin


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
