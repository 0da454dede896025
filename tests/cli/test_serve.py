"""`finetune serve` starts what is installed, with a key that is no argument, else prints what to type."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy
import pytest
from safetensors.numpy import save_file

from finetune.card import find_card
from finetune.cli.serve import serve_run, server_commands
from finetune.files import write_json, write_manifest
from finetune.planner.plan import Plan, Verdict
from finetune.recipe import recipe_from
from finetune.run.directory import RunDirectory
from finetune.settings import resolve_plain
from finetune.units import GIB

RECORDING = """#!/bin/sh
printf '%s\\n' "$@" > arguments
printf '%s' "$VLLM_API_KEY$LLAMA_API_KEY" > key
"""


@pytest.fixture
def run(home):
    """A finished QLoRA run of the bundled model on a GPU of 24 GB."""
    run = RunDirectory(home / "runs" / "support")
    seal_adapter(run)
    plan_for(run)
    return run


def plan_for(run, total_bytes=24 * GIB, **more):
    settings = resolve_plain(
        recipe_from({"model_name_or_path": "tiny", "dataset": {"path": "support"}, "load_in_4bit": True, **more})
    )
    card = replace(find_card("rtx-4090"), total_bytes=total_bytes)
    write_json(run.plan, Plan(settings, {}, card, Verdict.FITS).as_json())


def seal_adapter(run, **config):
    run.adapter.mkdir(parents=True, exist_ok=True)
    write_json(run.adapter / "adapter_config.json", {"peft_type": "LORA", "r": 12, "rank_pattern": {"q_proj": 20}, **config})
    save_file({"layer.lora_B.weight": numpy.zeros((1, 1), numpy.float32)}, run.adapter / "adapter_model.safetensors")
    (run.adapter / "chat_template.jinja").write_text("{{ messages }}")
    write_manifest(run.adapter, {})


def write_gguf(run, folder="gguf-q4_k_m"):
    path = run.path / folder / f"support-{folder[5:]}.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF")
    return path


def install_vllm(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").write_text(RECORDING)
    (tmp_path / "bin" / "vllm").chmod(0o755)


def test_vllm_gets_base_adapter_template_and_a_rank_that_it_accepts(run):
    (command,), note = server_commands(run, 8123)
    options = dict(zip(command[3::2], command[4::2], strict=False))
    assert command[:2] == ["vllm", "serve"] and command[2].endswith("tiny-base") and "--enable-lora" in command and not note
    assert command[command.index("--max-lora-rank") + 1] == "32" and f"support={run.adapter}" in command
    assert options["--host"] == "127.0.0.1" and options["--port"] == "8123" and options["--chat-template"].endswith(".jinja")


def test_a_model_taught_without_thoughts_is_not_asked_to_think(run):
    thinking = '{"enable_thinking": false}'
    (run.adapter / "chat_template.jinja").write_text("{{ messages }}{% if enable_thinking %}<think>{% endif %}")
    write_manifest(run.adapter, {})
    write_gguf(run)
    run.data.mkdir()
    for rows, is_said in ((9, False), (10, True)):  # one row of ten has a thought; none has
        write_json(run.data / "report.json", {"rows_used": 10, "findings": [{"kind": "unthinking", "rows": rows}]})
        llama, vllm = server_commands(run, 8000)[0]
        assert ("--chat-template-kwargs" in llama) == ("--default-chat-template-kwargs" in vllm) == is_said
        assert (llama.count(thinking), vllm.count(thinking)) == (is_said, is_said)


@pytest.mark.parametrize("config", [{"use_dora": True}, {"trainable_token_indices": [1]}, {"r": 513}])
def test_an_adapter_that_vllm_can_not_read_is_merged_first(run, config):
    seal_adapter(run, **config)
    assert server_commands(run, 8000)[0] == [] and "finetune merge" in server_commands(run, 8000)[1]
    (run.path / "merged").mkdir()
    write_json(run.path / "merged" / "config.json", {})
    assert [command[:2] for command in server_commands(run, 8000)[0]] == [["transformers", "serve"]]


def test_where_the_16_bit_weights_do_not_fit_a_gguf_is_named(run):
    plan_for(run, total_bytes=2**20)
    commands, note = server_commands(run, 8000)
    assert commands == [] and "16-bit weights" in note and "finetune export" in note and "--type q4_k_m" in note
    write_gguf(run, "gguf-adapter-f16")
    gguf = write_gguf(run)
    (command,), note = server_commands(run, 8000)
    assert command[0] == "llama-server" and str(gguf) in command and str(gguf) in note
    plan_for(run, total_bytes=2**20, load_in_4bit=False)
    assert [command[0] for command in server_commands(run, 8000)[0]] == ["llama-server", "vllm"]


@pytest.mark.slow
@pytest.mark.parametrize("own_key", ["", "mine"])
def test_an_installed_server_is_started_with_a_key_that_is_no_argument(run, tmp_path, own_key):
    install_vllm(tmp_path)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    command = [sys.executable, "-m", "finetune", "serve", str(run.path), "--port", "8123"]
    environment = {**os.environ, "PATH": path, "VLLM_API_KEY": own_key}
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=tmp_path, env=environment).stdout
    key, arguments = (tmp_path / "key").read_text(), (tmp_path / "arguments").read_text()
    assert "8123" in arguments and key not in arguments and "--api-key" not in arguments
    assert key == own_key and "mine" not in printed if own_key else len(key) > 30 and f"VLLM_API_KEY={key} vllm" in printed
    assert not [file for file in run.path.rglob("*") if file.is_file() and key.encode() in file.read_bytes()]


def test_without_an_installed_server_or_when_asked_the_commands_are_only_printed(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.execvpe", None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    serve_run(str(run.path), 8000, only_commands=False, as_json=False)
    install_vllm(tmp_path)
    serve_run(str(run.path), 8000, only_commands=True, as_json=False)
    assert capsys.readouterr().out.count("vllm serve") == 2
    serve_run(str(run.path), 8000, only_commands=False, as_json=True)
    assert json.loads(capsys.readouterr().out)["commands"][0].startswith("VLLM_API_KEY=")
