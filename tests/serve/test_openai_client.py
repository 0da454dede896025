"""The real `openai` client against a server with a base model and two adapters."""

import json
import shutil
import threading
import time

import pytest

from finetune.run.directory import RunDirectory

openai = pytest.importorskip("openai", reason="no openai; pip install openai")
pytestmark = pytest.mark.slow

TOKEN = "token-of-the-test-1234"
ASK = [{"role": "user", "content": "Route this message: Hi, My invoice is wrong. Thanks."}]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """URL of a server with `finished` and `other`, whose adapter is noise, and its engine."""
    import tarfile
    from pathlib import Path

    import torch
    import uvicorn
    from safetensors.torch import load_file, save_file

    from finetune.serve.api import build
    from finetune.serve.engine import Engine
    from finetune.serve.models import Models, runs_by_name
    from finetune.system import port_socket

    folder = tmp_path_factory.mktemp("served")
    with tarfile.open(Path(__file__).parents[1] / "compat_runs" / "finished.tar.gz") as archive:
        archive.extractall(folder)
    shutil.copytree(folder / "finished", folder / "other")
    weights = folder / "other" / "adapter" / "adapter_model.safetensors"
    torch.manual_seed(0)
    noise = {name: torch.randn_like(value) for name, value in load_file(weights).items()}
    save_file(noise, weights, {"format": "pt"})
    models = Models(runs_by_name([RunDirectory(folder / "finished"), RunDirectory(folder / "other")]))
    engine, bound = Engine(models, tokens=512, max_waiting=1), port_socket()
    bound.bind(("127.0.0.1", 0))
    bound.listen()
    server = uvicorn.Server(uvicorn.Config(build(engine, TOKEN), log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    yield f"http://127.0.0.1:{bound.getsockname()[1]}/v1", engine, folder
    server.should_exit = True
    thread.join()
    engine.close()


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=served[0], api_key=TOKEN, max_retries=0)


def answer(client, model, **options):
    completion = client.chat.completions.create(model=model, messages=ASK, **{"temperature": 0, **options})
    return completion.choices[0].message.content, completion.choices[0].finish_reason, completion.usage.completion_tokens


def test_base_and_two_adapters_answer_as_each_does_alone(served, client):
    from finetune.evaluate.answerer import Answerer

    assert [model.id for model in client.models.list()] == ["base", "finished", "other"]
    answers = [(name, answer(client, name, max_tokens=20)[0]) for name in ("other", "finished", "base", "other", "finished")]
    alone = {}
    for name in ("finished", "other"):
        answerer = Answerer(RunDirectory(served[2] / name))
        alone[name] = answerer.answer([answerer.prompt_ids(ASK)], max_new_tokens=20)[0]
    with answerer.using("base"):
        alone["base"] = answerer.answer([answerer.prompt_ids(ASK)], max_new_tokens=20)[0]
    assert answers == [(name, alone[name]) for name, _ in answers] and alone["other"] not in (alone["base"], alone["finished"])


def test_a_streamed_answer_is_the_whole_answer_in_pieces(client):
    full_answer, reason, tokens = answer(client, "finished")
    pieces = list(client.chat.completions.create(model="finished", messages=ASK, temperature=0, stream=True,
                                                 stream_options={"include_usage": True}))  # fmt: skip
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == full_answer
    assert sum(bool(piece.choices and piece.choices[0].delta.content) for piece in pieces) > 3
    assert pieces[-2].choices[0].finish_reason == reason == "stop" and pieces[-1].usage.completion_tokens == tokens


def test_settings_of_a_request_are_respected(client):
    full_answer = answer(client, "finished")[0]
    middle = full_answer[len(full_answer) // 2 :][:3]
    assert answer(client, "finished", stop=[middle])[:2] == (full_answer[: full_answer.index(middle)], "stop")
    assert answer(client, "finished", max_tokens=3)[1:] == ("length", 3)
    hot = {"temperature": 1.5, "max_tokens": 12}
    answers = [answer(client, "base", seed=seed, **hot)[0] for seed in (5, 5, 6)]
    assert answers[0] == answers[1] != answers[2]
    assert answer(client, "base", seed=6, **{**hot, "top_p": 1e-6})[0] == answer(client, "base", max_tokens=12)[0]


def test_without_the_token_every_request_is_refused(served, client):
    with pytest.raises(openai.AuthenticationError) as error:
        answer(client.with_options(api_key="another-token-12345"), "base")
    assert (error.value.status_code, error.value.code) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="x").models.list()


def test_a_bad_request_gets_the_error_of_the_interface(client):
    with pytest.raises(openai.NotFoundError):
        answer(client, "gpt-9")
    with pytest.raises(openai.BadRequestError) as error:
        answer(client, "base", max_tokens=9_999)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as error:
        answer(client, "base", temperature=7)
    assert error.value.param == "temperature"


def test_a_client_that_disconnects_ends_its_answer(served, client):
    engine = served[1]
    for seed in range(1, 20):  # an answer may end before this process has looked
        stream = client.chat.completions.create(model="base", messages=ASK, temperature=1.9, seed=seed, stream=True)
        next(iter(stream))
        if engine._open_requests:
            break
    assert engine._open_requests
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        answer(client.with_options(timeout=0.05), "base", temperature=1.9, seed=1)
    deadline = time.monotonic() + 60
    while engine._open_requests and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not engine._open_requests


def test_the_command_prints_where_it_listens_and_commands_for_others(served):
    import subprocess
    import sys

    command = [sys.executable, "-m", "finetune", "serve", str(served[2] / "finished"), "--commands", "--json"]
    printed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert "--max-lora-rank 1 " in printed["vllm"] and "llama-server" in printed["llama.cpp"]
