"""A run as GGUF in llama.cpp itself: the same prompt ids and answers, or a refusal that names the stage."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from finetune.bundled import dataset_paths
from finetune.errors import DiskFull, ModelError
from finetune.export import GGUF_TYPES, gguf
from finetune.export.parity import LlamaCpp, ParityError
from finetune.run.directory import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.llama]
ROWS = str(dataset_paths("support")["eval"])


@pytest.fixture(scope="module")
def checkout():
    return Path(os.environ["FINETUNE_LLAMA_CPP"])


@pytest.fixture(scope="module")
def run(tmp_path_factory, kept_run):
    return RunDirectory(kept_run(tmp_path_factory.mktemp("exported")))


@pytest.fixture(scope="module")
def exported(run, checkout):
    return gguf.export_gguf(run, llama_cpp=checkout, data=ROWS)


def test_120_prompts_have_the_same_ids_and_nearly_all_answers_are_the_adapters(exported, run):
    assert exported.check.prompts == exported.check.rows == 120 and exported.check.conversations > 120
    assert exported.check.same_answers >= 0.95 * 120
    assert sorted(path.name for path in exported.folder.iterdir()) == ["Modelfile", "finished-f16.gguf"]
    assert exported.file.stat().st_mode & 0o044 == 0o044
    assert 'PARAMETER stop "<|end|>"' in exported.modelfile.read_text() and not list(run.path.glob(".gguf*"))


def test_base_and_adapter_in_two_files_answer_like_the_adapter(exported, run, checkout):
    export = gguf.export_gguf(run, llama_cpp=checkout, separate=True, data=ROWS, rows=20)
    assert sorted(path.name for path in export.folder.iterdir()) == ["Modelfile", "base-f16.gguf", "finished-adapter.gguf"]
    assert export.check.same_answers >= 19 and "\nADAPTER ./finished-adapter.gguf\n" in export.modelfile.read_text()
    assert export.adapter.stat().st_size < 0.2 * export.file.stat().st_size


@pytest.fixture(scope="module")
def expected(exported, run):
    return gguf._Expected(run, ROWS, 20, lambda _: None)


def changed(exported, folder, old, new):
    """A copy of the file with some bytes replaced by as many others."""
    data = exported.file.read_bytes()
    assert data.count(old) and len(old) == len(new)
    path = folder / "changed.gguf"
    path.write_bytes(data.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("stage", "old", "new"),
    [
        ("tokens", b"\x06\x00\x00\x00\x00\x00\x00\x00smollm", b"\x06\x00\x00\x00\x00\x00\x00\x00falcon"),
        ("template", b"message['role'] + '|>'", b"message['role'] + '|)'"),
        ("template", b"{%- if add_generation_prompt", b"{%- if no_generation_prompt_"),
    ],
)
def test_a_file_that_differs_is_refused_with_the_first_stage(exported, expected, home, stage, old, new):
    with pytest.raises(ParityError) as error:
        gguf._check_parity(changed(exported, home, old, new), None, expected, "f16", lambda _: None)
    assert error.value.stage == stage and error.value.exit_code == 1


def test_other_weights_are_refused_by_their_answers(exported, expected, home):
    data = bytearray(exported.file.read_bytes())
    data[-400_000:] = bytes(400_000)
    (home / "changed.gguf").write_bytes(data)
    with pytest.raises(ParityError) as error:
        gguf._check_parity(home / "changed.gguf", None, expected, "f16", lambda _: None)
    assert error.value.stage == "logits"


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
def test_a_quantised_file_is_smaller_and_has_the_same_tokens(exported, expected, home, kind):
    gguf._quantise(exported.file, home / "small.gguf", kind)
    parity, _ = gguf._check_parity(home / "small.gguf", None, expected, kind, lambda _: None)
    assert (home / "small.gguf").stat().st_size < 0.75 * exported.file.stat().st_size
    assert parity.same_answers >= GGUF_TYPES[kind].min_same_answers * parity.rows


def test_a_refused_export_keeps_nothing(exported, run, checkout, home, monkeypatch):
    def broken(run, file, adapter, kind, llama_cpp, progress):
        shutil.copyfile(changed(exported, home, b"message['role'] + '|>'", b"message['role'] + '|)'"), file)

    monkeypatch.setattr(gguf, "_convert", broken)
    with pytest.raises(ParityError, match="stage template"):
        gguf.export_gguf(run, home / "out", llama_cpp=checkout, data=ROWS, rows=20)
    assert not (home / "out").exists() and not (home / ".out").exists()


def test_the_converter_of_a_killed_export_ends_with_it(exported, run, checkout, home):
    gc.freeze()
    pid = os.fork()
    if not pid:
        gguf.export_gguf(run, home / "out", llama_cpp=checkout, data=ROWS, rows=20)
        os._exit(0)
    while not (converter := psutil.Process(pid).children()):
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert psutil.wait_procs(converter, timeout=600)[1] == [] and not (home / "out").exists()


def test_a_missing_base_model_is_reported_before_anything_is_written(run, checkout, home, kept_run):
    other = RunDirectory(kept_run(home))
    other.plan.write_text(other.plan.read_text().replace('"model_name_or_path": "tiny"', '"model_name_or_path": "./nowhere"'))
    with pytest.raises(ModelError, match="nowhere") as missing:
        gguf.export_gguf(other, llama_cpp=checkout, data=ROWS, rows=5)
    assert missing.value.exit_code == 2
    assert not list(other.path.glob("*gguf*"))


def test_a_prompt_is_answered_again_after_another(exported, expected):
    with LlamaCpp(exported.file, expected.context) as file:
        first = [file.answer(prompt, expected.stops, 20) for prompt in expected.rows.prompt_ids[:3]]
        assert [file.answer(prompt, expected.stops, 20) for prompt in expected.rows.prompt_ids[:3][::-1]] == first[::-1]


def test_a_disk_that_fills_while_llama_cpp_writes_is_reported_and_nothing_is_kept(run, checkout, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs can't be mounted here: {mounted.stderr.strip()}")

    def fill(message):
        if message.startswith("converting"):
            with (disk / "ballast").open("wb") as file:
                file.write(bytes(shutil.disk_usage(disk).free - 2**20))

    try:
        with pytest.raises(DiskFull, match="No space left") as full:
            gguf.export_gguf(run, disk / "out", llama_cpp=checkout, data=ROWS, rows=5, progress=fill)
        assert full.value.exit_code == 7
        assert [path.name for path in disk.iterdir()] == ["ballast"]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_new_token_is_in_the_file_and_in_its_answers(tmp_path, checkout):
    rows = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "Route this message: order 7"}, {"role": "assistant", "content": "<|ticket|>"}]
    rows.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"messages": messages}) + "\n")
    settings = [f"dataset.path={rows}", 'new_tokens={"<|ticket|>": support ticket}', "max_steps=16", "effective_batch_size=2"]
    more = ["per_device_train_batch_size=2", "eval_steps=0", f"output_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "finetune", "run", "tiny-cpu", *settings, *more]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    export = gguf.export_gguf(RunDirectory(tmp_path / "run"), llama_cpp=checkout, data=str(rows))
    assert export.check.same_answers == export.check.rows == 2
    with LlamaCpp(export.file, 64) as model:
        [token] = model.tokenise("<|ticket|>", bos=False)
        assert model._model.detokenize([token]).decode() == "<|ticket|>"
