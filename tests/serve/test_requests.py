"""Supported requests, where an answer stops, and the order of the queue."""

import asyncio
import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.errors import CommandError, OutOfMemory, PackagesError
from finetune.model.generate import Streamed
from finetune.serve.engine import AnswerEnd, Engine, StopFilter
from finetune.serve.requests import RequestError, read_request

REQUEST = {"model": "base", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("stops", "pieces", "text"),
    [
        ([], ["a", "b"], "ab"),
        (["STOP"], ["one S", "TO", "P two"], "one "),
        (["STOP"], ["one S", "TO", "NE"], "one STONE"),
        (["b", "ab"], ["aab"], "a"),
        (["aab"], ["aa", "ab"], "a"),
        (["\n\n"], ["x\n", "y\n", "\nz"], "x\ny"),
    ],
)
def test_an_answer_ends_before_a_stop_however_it_is_cut_into_pieces(stops, pieces, text):
    emitted = []
    stop_filter = StopFilter(stops, emitted.append)
    for piece in pieces:
        stop_filter.add(piece)
    stop_filter.finish()
    assert "".join(emitted) == text and stop_filter.is_stopped == any(stop in "".join(pieces) for stop in stops)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        ({"seed": "one"}, "seed"),
        ({"stop": ["a", ""]}, "stop"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object"}, "tools": [{"type": "function", "function": {"name": "f"}}]},
            "response_format",
        ),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"temprature": 0.5}, "temprature"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, param):
    with pytest.raises(RequestError) as error:
        read_request({**REQUEST, **change})
    assert error.value.status == 400 and error.value.as_json()["error"]["param"] == param


def test_the_reason_is_that_of_the_message_that_is_named():
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}]}
    for content, reason in ((5, "only text and pictures"), (picture["content"], "must be a data: address")):
        with pytest.raises(RequestError, match=f"messages.0.content: .*{reason}"):
            read_request({**REQUEST, "messages": [{"role": "user", "content": content}, picture]})


def test_fields_without_effect_are_accepted_and_the_others_respected():
    body = {"n": 1, "user": "me", "presence_penalty": 0, "tools": None, "response_format": {"type": "text"}, "seed": 4}
    request = read_request({**REQUEST, **body, "temperature": 0, "max_tokens": 5, "max_completion_tokens": 7, "stop": "x"})
    assert (request.max_new_tokens, request.stops, request.sampling.temperature, request.sampling.seed) == (7, ["x"], 0.0, 4)
    assert read_request(REQUEST).sampling.temperature == 1.0
    parts = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert read_request({**REQUEST, "messages": parts}).messages[0].as_message() == {"role": "system", "content": "ab"}


class OneWord:
    """Answers one word per permit, and records which requests were answered and which stopped."""

    names = ["base"]

    def __init__(self):
        self.go, self.answered, self.stopped = threading.Semaphore(0), [], []

    def prompt_ids(self, name, messages):
        return [1] * len(messages[-1]["content"])

    def stream(self, name, question, *, max_new_tokens, sampling, say, stopped):
        for index in range(max_new_tokens):
            while not self.go.acquire(timeout=0.01):
                if stopped():
                    self.stopped.append(sampling.seed)
                    return Streamed("", index, 1.0, True)
            say("word ")
        self.answered.append(sampling.seed)
        return Streamed("", max_new_tokens, 1.0, False)


def test_requests_are_answered_in_order_and_a_client_that_disconnects_leaves_the_queue():
    async def answer(engine, **body):
        return [piece async for piece in await engine.answer(read_request({**REQUEST, **body}))]

    async def scenario(models, engine):
        disconnecting = asyncio.create_task(answer(engine, seed=1, max_tokens=9))
        others = [asyncio.create_task(answer(engine, seed=seed, max_tokens=2)) for seed in (2, 3)]
        models.go.release()
        await asyncio.sleep(0.05)
        with pytest.raises(RequestError) as error:
            await answer(engine)
        assert error.value.status == 429
        disconnecting.cancel()
        while not models.stopped:
            await asyncio.sleep(0.01)
        models.go.release(4)
        assert await asyncio.gather(*others) == [["word ", "word ", AnswerEnd("length", 2, 2)]] * 2

    models = OneWord()
    engine = Engine(models, tokens=20, max_waiting=2)
    asyncio.run(scenario(models, engine))
    engine.close()
    assert (models.stopped, models.answered) == ([1], [2, 3])


def test_no_more_requests_are_delayed_than_may_wait():
    async def scenario(engine):
        async def drain(seed):
            return [piece async for piece in await engine.answer(read_request({**REQUEST, "seed": seed, "max_tokens": 1}))]

        tasks = [asyncio.create_task(drain(seed)) for seed in range(3)]
        while len(engine._open_requests) < 3:
            await asyncio.sleep(0.001)
        tasks += [asyncio.create_task(drain(seed)) for seed in range(3, 50)]
        await asyncio.sleep(0)
        assert [task.done() for task in tasks] == [False] * 5 + [True] * 45
        assert all(task.exception().status == 429 for task in tasks[5:])
        models.go.release(5)
        await asyncio.gather(*tasks, return_exceptions=True)

    models = OneWord()
    engine = Engine(models, tokens=20, max_waiting=2)
    asyncio.run(scenario(engine))
    engine.close()


def test_a_missing_package_is_an_error_of_the_server(monkeypatch):
    def opens_no_picture(*_):
        raise PackagesError("the package that opens pictures is missing", "Install it.")

    monkeypatch.setattr(OneWord, "prompt_ids", opens_no_picture)
    with pytest.raises(RequestError, match="is missing") as error:
        asyncio.run(Engine(OneWord(), tokens=20).answer(read_request(REQUEST)))
    assert error.value.status == 500


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "other"}, 404, "model_not_found"),
        ({"max_tokens": 19}, 400, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * 20}]}, 400, "context_length_exceeded"),
    ],
)
def test_a_missing_model_and_too_many_tokens_are_refused(body, status, code):
    engine = Engine(OneWord(), tokens=20)
    with pytest.raises(RequestError) as error:
        asyncio.run(engine.answer(read_request({**REQUEST, **body})))
    assert (error.value.status, error.value.code) == (status, code)


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [*REQUEST["messages"], {"role": "assistant", "tool_calls": [CALL]}]}, "messages"),
    ],
)
def test_a_template_that_writes_no_calls_refuses_tools_and_calls(monkeypatch, body, param):
    monkeypatch.setattr(OneWord, "reader", lambda *_: None, raising=False)
    engine = Engine(OneWord(), tokens=200)
    with pytest.raises(RequestError, match="writes no calls") as error:
        asyncio.run(engine.answer(read_request({**REQUEST, **body})))
    assert error.value.param == param


@pytest.fixture
def two_runs(home, kept_run):
    from finetune.run.directory import RunDirectory

    first = kept_run(home)
    second = first.rename(home / "second")
    return [RunDirectory(kept_run(home)), RunDirectory(second)]


def change_adapter(run, **values):
    path = run.adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    if "r" in values:  # the weights say the same
        tensors = load_file(run.adapter / "adapter_model.safetensors")
        rows = {name: values.get("rank_pattern", {}).get(name.split(".")[-3], values["r"]) for name in tensors}
        resized = {
            name: torch.zeros((rows[name], tensor.shape[1]) if "lora_A" in name else (tensor.shape[0], rows[name]))
            for name, tensor in tensors.items()
        }
        save_file(resized, run.adapter / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("values", "rank"),
    [({"r": 4}, 8), ({"r": 16}, 16), ({"r": 8, "rank_pattern": {"q_proj": 33}}, 64), ({"r": 300}, 320)],
)
def test_the_rank_printed_for_vllm_is_one_that_it_accepts_and_no_smaller(two_runs, values, rank):
    from finetune.serve import external_servers
    from finetune.serve.models import runs_by_name

    change_adapter(two_runs[1], **values)
    command = external_servers.vllm_command(runs_by_name(two_runs)).split()
    assert command[command.index("--max-lora-rank") + 1] == str(rank) and "--max-loras 2" in " ".join(command)
    assert command[-2:] == [f"{run.path.name}={run.adapter.resolve()}" for run in two_runs]


def test_vllm_can_not_load_dora_and_names_must_differ(two_runs):
    from finetune.serve import external_servers
    from finetune.serve.models import runs_by_name

    change_adapter(two_runs[0], use_dora=True)
    with pytest.raises(CommandError, match="no DoRA"):
        external_servers.vllm_command(runs_by_name(two_runs))
    with pytest.raises(CommandError, match="would be called"):
        runs_by_name([two_runs[0], two_runs[0]])


def test_what_fits_is_counted_before_loading(two_runs, monkeypatch):
    import psutil

    from finetune.model.transformers_config import load_config
    from finetune.planner.plan import read_plan
    from finetune.serve.memory_check import serving_memory

    settings = read_plan(two_runs[0].plan).settings
    config = load_config(settings)
    memory = serving_memory(settings, config, on_cpu=True)
    assert memory.token_bytes == 2 * 5 * 3 * 32 * 4 and memory.tokens == 512  # K and V, layers, heads, their size, float32
    assert serving_memory(settings, config, on_cpu=True, context=100).tokens == 100

    class Little:
        available = memory.weight_bytes + 2**29 + 300 * 3840

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Little)
    assert serving_memory(settings, config, on_cpu=True).tokens == 300
    with pytest.raises(OutOfMemory, match="KV cache"):
        serving_memory(settings, config, on_cpu=True, context=400)


def test_of_the_offloaded_layers_only_two_are_counted_on_a_card(two_runs):
    from finetune.model.build import build_base
    from finetune.model.transformers_config import load_config
    from finetune.planner.plan import read_plan
    from finetune.serve.memory_check import _offloaded_bytes

    settings = read_plan(two_runs[0].plan).settings
    model = build_base(settings, load_config(settings), device="meta", weights=False)
    matrices = 4 * (2 * 192 * 192 + 2 * 96 * 192 + 3 * 192 * 512)  # float32: attention, MLP
    assert [_offloaded_bytes(model, count) for count in (2, 3, 5)] == [0, matrices, 3 * matrices]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, "must be a data: address"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "must be a data: address"),
        ({"type": "input_audio", "input_audio": {"data": ""}}, "only text and pictures"),
    ],
)  # fmt: skip
def test_a_request_names_no_file_and_no_address_for_a_picture(part, reason):
    with pytest.raises(RequestError, match=rf"messages.0.content: .*{reason}"):
        read_request({"model": "base", "messages": [{"role": "user", "content": [part]}]})


def test_pictures_of_a_request_are_counted_and_only_the_users():
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    request = read_request({"model": "base", "messages": [{"role": "user", "content": [picture] * 17}]})
    with pytest.raises(ValueError, match="17 pictures; a request has at most 16"):
        _ = request.pictures
    with pytest.raises(RequestError, match="only the user's"):
        read_request({"model": "base", "messages": [{"role": "system", "content": [picture]}]})
