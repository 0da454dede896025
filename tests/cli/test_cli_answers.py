"""The command line answers at once, in one screen, with the fix, and with the documented exit codes."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "gradio", "bitsandbytes")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["run", "nothing.yaml"], ["recipes"], ["runs"], ["--version"]]
)
def test_help_and_recipe_errors_import_nothing_heavy(arguments):
    code = (
        "import sys; sys.argv = ['finetune', *sys.argv[1:]]\nfrom finetune.cli import process\n"
        f"process()\nprint('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert process.stdout.splitlines()[-1] == "HEAVY []"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "code", "message"),
    [("lorar=3", 2, "did you mean 'lora_r'"), ("dataset.path=missing.jsonl", 4, "missing.jsonl"),
     ("model_name_or_path=no/such-folder/x", 2, "no/such-folder/x"), ("gpu=rtx-4909", 2, "rtx-4090"),
     ("output_dir=" + "a" * 300, 2, "255 bytes"), ("num_train_epochs=1e308", 2, "num_train_epochs"),
     ("lora_r=9999", 2, "lora_r"), ("output_dir=a-file/x", 7, "is a file"),
     ("model_name_or_path=~nouser/x", 2, "~nouser/x"), ("dataset.path=~nouser/x.jsonl", 4, "~nouser/x.jsonl")],
)  # fmt: skip
def test_bad_input_is_named_on_one_screen_with_its_exit_code(finetune, override, code, message, home):
    (home / "a-file").touch()
    answered, shown = finetune("run", "tiny-cpu", override)
    assert answered == code and message in shown and "Traceback" not in shown and "Internal" not in shown
    assert len(shown.err.splitlines()) < 24


def test_an_empty_recipe_is_named(finetune, tmp_path):
    (tmp_path / "r.yaml").touch()
    code, shown = finetune("run", tmp_path / "r.yaml")
    assert code == 2 and "empty" in shown


@pytest.mark.slow
def test_a_card_that_is_not_here_is_reported_before_anything_is_written(finetune, tmp_path):
    code, shown = finetune("run", "tiny-cpu", "gpu=auto", f"output_dir={tmp_path}/runs/x")
    assert code == 2 and "gpu: cpu" in shown.replace("gpu=cpu", "gpu: cpu")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["resume", "watch", "pause", "eval", "chat", "merge"])
def test_a_run_that_is_not_there_is_reported(finetune, command):
    code, shown = finetune(command, "nothing")
    assert code == 2 and "not a run directory" in shown


@pytest.mark.parametrize(
    "arguments", [["run", "none.yaml"], ["plan", "tiny-cpu", "--nope"], ["eval", "latest", "--rows", "-1"]]
)
def test_errors_and_wrong_usage_are_json_too(finetune, arguments):
    code, shown = finetune(*arguments, "--json")
    answer = json.loads(shown.out)
    assert code == 2 and answer["error"] and answer["problems"]


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m finetune recipes keys | head -1; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", command], capture_output=True).returncode == 0
