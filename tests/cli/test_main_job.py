"""The main job as a user types it: fine-tune the bundled model, score it, chat with it, list it, merge it."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def finetune(*arguments, cwd, code=0, python=sys.executable):
    process = subprocess.run([python, "-m", "finetune", *arguments], capture_output=True, text=True, cwd=cwd)
    assert process.returncode == code, process.stdout[-2000:] + process.stderr[-2000:]
    return process.stdout


@pytest.fixture(scope="module")
def finished_run(shipped_run):
    """A folder where the shipped recipe was run, and the events that --json printed."""
    folder, printed = shipped_run
    return folder, [json.loads(line) for line in printed.splitlines()]


@pytest.fixture
def finetune_again(finished_run, warm_python):
    """A command about the run: without the seconds that the first ones have spent on imports."""
    return functools.partial(finetune, cwd=finished_run[0], python=warm_python)


def test_json_streams_events_with_phases_and_two_forecast_checks_and_ends_with_run_and_state(finished_run):
    folder, events = finished_run
    assert events[-1]["state"] == "finished" and (folder / events[-1]["run"] / "adapter").is_dir()
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (folder / events[-1]["run"] / "adapter").iterdir())
    steps = [event for event in events[:-1] if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, steps[-1]["total_steps"] + 1))
    for name in ("loss", "learning_rate", "grad_norm", "supervised_tokens", "real_tokens", "padded_tokens", "step_s",
                 "process_rss_bytes", "process_peak_rss_bytes"):  # fmt: skip
        assert all(isinstance(event[name], (int, float)) for event in steps), name
    assert all(event["allocated_bytes"] is None for event in steps)  # no card here: unknown, not 0
    events = finished_run[1][:-1]
    phases = {event["phase"]: event["phase_s"] for event in events if event["kind"] == "phase"}
    assert set(phases) == {"load", "evaluate", "save"} and all(took_s > 0 for took_s in phases.values())
    assert [event["at"] for event in events if event["kind"] == "forecast"] == ["first steps", "end"]
    assert [event["version"] for event in events if event["kind"] == "start"] == [1]


def test_held_out_exact_match_goes_from_nothing_to_nearly_all(finished_run):
    scores = json.loads(finetune("eval", "latest", "--json", cwd=finished_run[0]))
    assert scores["rows"] >= 100
    assert scores["base"]["exact_match"] <= 0.10
    assert scores["tuned"]["exact_match"] >= 0.90
    assert scores["tuned"]["loss"] < scores["base"]["loss"] / 5


def test_chat_answers_differently_from_the_base(finished_run, finetune_again):
    prompt = "Route this message: Hi, Where is my parcel with the desk lamp? Thanks."
    tuned = json.loads(finetune_again("chat", "latest", "--prompt", prompt, "--json"))["answer"]
    base = json.loads(finetune_again("chat", "latest", "--base", "--prompt", prompt, "--json"))["answer"]
    assert set(json.loads(tuned)) == {"queue", "priority", "product"} and tuned != base


def test_a_finished_run_is_not_resumed_and_its_recipe_repeats_it(finished_run, finetune_again):
    finetune_again("resume", "latest", code=2)
    recipe = Path(finished_run[1][-1]["run"]) / "recipe.yaml"
    finetune_again("run", str(recipe), "max_steps=2", "eval_steps=0", "sample_answers=0", "--json")
    assert len(json.loads(finetune_again("runs", "--json"))) == 2


def test_the_merged_model_answers_as_the_adapter_does(finished_run, finetune_again, warm_python):
    run = finished_run[1][-1]["run"]
    finetune_again("merge", run, "--output", "merged")
    code = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained("merged"), AutoTokenizer.from_pretrained("merged")
ids = tokenizer.apply_chat_template([{"role": "user", "content": "Route this message: Hi, My invoice is wrong. Thanks."}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = model.generate(**ids, max_new_tokens=60, do_sample=False)[0][ids["input_ids"].shape[1]:]
print(tokenizer.decode(answer, skip_special_tokens=True))
"""
    process = subprocess.run([warm_python, "-c", code], capture_output=True, text=True, cwd=finished_run[0], check=True)
    assert set(json.loads(process.stdout)) == {"queue", "priority", "product"}


def test_data_shows_what_is_trained(finished_run, finetune_again):
    shown = json.loads(finetune_again("data", "tiny-cpu", "--json"))
    assert (shown["rows_read"], shown["rows_refused"]) == (shown["rows_used"], [])
    assert 0.2 < shown["trained_token_share"] < 0.6
    trained = "".join(part["text"] for part in shown["example"] if part["trained"])
    assert trained.startswith("{") and trained.endswith("<|end|>")
