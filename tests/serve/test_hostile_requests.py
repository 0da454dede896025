"""What anybody can send to the server gets OpenAI's error object, and no client keeps the others waiting."""

import asyncio
import socket
import threading
import time

import pytest
from fastapi.testclient import TestClient

from finetune import http_server
from finetune.model.generate import Streamed
from finetune.serve.api import build
from finetune.serve.engine import Engine
from finetune.serve.requests import RequestError, read_request

HEADERS = {"authorization": "Bearer token"}
ASK = b'{"model": "base", "messages": [{"role": "user", "content": "%s"}]}'


class SlowTokeniser:
    names = ["base"]

    def __init__(self):
        self.go = threading.Event()

    def prompt_ids(self, name, messages):
        self.go.wait(60)
        return [1]

    def reads_pictures(self, name):
        return False

    def stream(self, name, question, *, max_new_tokens, sampling, say, stopped):
        return Streamed("", 1, 1.0, False)


@pytest.fixture
def engine():
    models = SlowTokeniser()
    models.go.set()
    engine = Engine(models, tokens=20)
    yield engine
    engine.models.go.set()  # or closing waits for what is tokenised
    engine.close()


@pytest.fixture
def client(engine):
    with TestClient(build(engine, "token"), headers=HEADERS, raise_server_exceptions=True) as client:
        yield client


@pytest.mark.parametrize("body", [b"[" * 100_000, ASK % rb"\ud800", b"\xff", ASK % (b"x" * 10_000), b"{"])
def test_a_body_that_is_no_request_is_refused_as_openai_does(client, body):
    answer = client.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_no_prompt_fits_is_not_parsed(client):
    answer = client.post("/v1/chat/completions", content=b"[" * 400_000)
    assert answer.status_code == 413 and "limit of tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize("method, path, status", [("get", "/none", 404), ("put", "/health", 405), ("get", "/health/", 404)])
def test_a_route_that_is_not_there_is_refused_as_openai_does(client, method, path, status):
    answer = client.request(method, path, follow_redirects=False)
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_more_stop_texts_than_openai_allows_are_refused():
    request = {"model": "base", "messages": [{"role": "user", "content": "x"}]}
    assert len(read_request({**request, "stop": ["a"] * 4}).stops) == 4
    with pytest.raises(RequestError, match="at most 4"):
        read_request({**request, "stop": ["a"] * 5})


def test_other_clients_are_served_while_a_prompt_is_tokenised(engine):
    async def scenario():
        engine.models.go.clear()
        request = read_request({"model": "base", "messages": [{"role": "user", "content": "x"}]})
        asking = asyncio.create_task(engine.answer(request))
        await asyncio.sleep(0.05)
        assert not asking.done()
        engine.models.go.set()
        await (await asking).aclose()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_short_prompt_does_not_wait_for_a_long_one(engine):
    class Models(SlowTokeniser):
        def prompt_ids(self, name, messages):
            return super().prompt_ids(name, messages) if len(messages[0]["content"]) > 10_000 else [1]

    def ask(text):
        return engine.answer(read_request({"model": "base", "messages": [{"role": "user", "content": text}]}))

    async def scenario():
        engine.models, engine._tokens = Models(), 10_000
        asking = asyncio.create_task(ask("x" * 10_001))
        await asyncio.sleep(0)  # it is tokenised first
        await (await ask("x")).aclose()
        assert not asking.done()
        engine.models.go.set()
        await (await asking).aclose()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_clients_that_leave_while_their_prompts_are_tokenised_wait_no_more(address, engine):
    engine._max_waiting = 0
    engine.models.go.clear()
    body = ASK % b"x"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(head % len(body) + body)
        while not engine._tokenising:
            time.sleep(0.01)
    deadline = time.monotonic() + 30
    while engine._tokenising and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine._tokenising


@pytest.fixture
def address(engine, monkeypatch):
    monkeypatch.setattr(http_server, "_REQUEST_HEAD_S", 0.2)
    monkeypatch.setattr(http_server, "_MOST_CONNECTIONS", 3)
    bound = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=http_server.serve_until_interrupted, args=[build(engine, "token"), bound], daemon=True).start()
    return bound.getsockname()


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n", HEALTH + HEALTH[:20]])
def test_a_connection_that_sends_no_complete_request_is_closed(address, sent):
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(sent)
        began = time.monotonic()
        while connection.recv(1000):
            pass
        assert time.monotonic() - began < 4  # uvicorn's own limit is 5 s, for those that are silent after a request


def test_more_connections_than_the_limit_are_refused(address, monkeypatch):
    monkeypatch.setattr(http_server, "_REQUEST_HEAD_S", 60)
    silent = [socket.create_connection(address, timeout=60) for _ in range(3)]
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(HEALTH)
        assert b" 503 " in connection.recv(1000)
    for connection in silent:
        connection.close()
