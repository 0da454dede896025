"""One real `finetune run` of a model shape with random weights: its measurements beside its forecast."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from make_model import make_model

from finetune.events import Event, State, Step, read_events
from finetune.serialise import to_json

RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu.jsonl"


def measure(
    shape: str, settings: dict[str, Any], *, length: int, steps: int, place: Path, cap_bytes: int | None = None
) -> dict[str, Any]:
    """Train `steps` steps on rows of exactly `length` tokens. Returns forecast and measurements; None is not measured.

    `cap_bytes` emulates a smaller card: the plan is made for it, and the worker's allocator is capped at it.
    """
    folder = place / "models" / shape.replace("/", "--")
    if not (folder / "model.safetensors.index.json").exists():
        make_model(shape, folder)
    rows = place / f"rows-{length}.jsonl"
    write_rows(rows, length, 64)
    recipe = place / "recipe.json"
    values = {
        "model_name_or_path": str(folder), "dataset": {"path": str(rows), "format": "text"}, "max_length": length,
        "max_steps": steps,
        "effective_batch_size": 4, "eval_steps": 0, "save_steps": 0, "output_dir": str(place / "run"), **settings,
    }  # fmt: skip
    if cap_bytes:
        values["memory_budget"] = str(cap_bytes)
    recipe.write_text(json.dumps(values))
    shutil.rmtree(place / "run", ignore_errors=True)
    began = time.perf_counter()
    command = [sys.executable, "-m", "finetune", "run", str(recipe), "--json", "--force"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    run = next((Path(line["run"]) for line in reversed(lines) if "run" in line), None)
    plan = json.loads((run / "plan.json").read_text()) if run else None
    measured = summary(read_events(run / "events.jsonl") if run else [])
    if not measured["state"]:
        measured["error"] = (done.stdout + done.stderr)[-2000:]
    known = {name: plan and plan[name] for name in ("forecast", "verdict", "plan")}
    facts = {"shape": shape, "settings": settings, "length": length, "cap_bytes": cap_bytes}
    return {**facts, "wall_s": time.perf_counter() - began, **known, **measured}


def summary(events: list[Event]) -> dict[str, Any]:
    """Peaks over all steps, and the median step time without the first two."""
    steps = [event for event in events if isinstance(event, Step)]
    later = [step.step_s for step in steps[2:] if step.step_s]
    rates = [step.tokens_per_s for step in steps[2:] if step.tokens_per_s]
    last = next((event for event in reversed(events) if isinstance(event, State)), None)

    def peak(name: str) -> int | None:
        return max((getattr(step, name) for step in steps if getattr(step, name) is not None), default=None)

    return {
        "state": last.state if last else None, "message": last.message if last else None, "steps": len(steps),
        "measured_allocated_bytes": peak("peak_allocated_bytes"), "measured_reserved_bytes": peak("peak_reserved_bytes"),
        "measured_card_bytes": peak("card_used_bytes"), "step_s": statistics.median(later) if later else None,
        "tokens_per_s": statistics.median(rates) if rates else None, "losses": [step.loss for step in steps],
    }  # fmt: skip


def write_rows(path: Path, length: int, count: int) -> None:
    """Write rows of plain text that are exactly `length` tokens with the bundled tokenizer, EOS included."""
    from transformers import AutoTokenizer

    from finetune.bundled import model_path

    tokenizer = AutoTokenizer.from_pretrained(str(model_path("tiny")))
    digits = "".join(str(number % 10) for number in range(length * 2))  # digits are one token each
    row = digits[: length - 1]
    while len(tokenizer(row, add_special_tokens=False)["input_ids"]) > length - 1:
        row = row[:-1]
    path.write_text("".join(json.dumps({"text": f"{index % 10}{row[1:]}"}) + "\n" for index in range(count)))


def environment() -> dict[str, Any]:
    """Card, driver and library versions, for the results file."""
    import torch

    values: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "card": None, "driver": None}
    from finetune.run.worker import versions

    values["versions"] = versions()
    if torch.cuda.is_available():
        import pynvml

        pynvml.nvmlInit()
        values["card"] = torch.cuda.get_device_name(0)
        driver = pynvml.nvmlSystemGetDriverVersion()
        values["driver"] = driver if isinstance(driver, str) else driver.decode()
    return values


def append(result: dict[str, Any], facts: dict[str, Any]) -> None:
    """Append one line to the committed results."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(to_json({**facts, **result})) + "\n")
