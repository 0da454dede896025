"""`serve` beside hostile clients: silent connections, prompts of 4 MB, and clients that leave.

A case is one round of all three, with 100 silent connections, 4 prompts and 100 leaving clients. After each of them the next
answer, of 64 tokens, must come within twice its usual time, and the server must write no traceback. Usual is the median of the
answers before and after it, without such clients: a busy machine slows them alike.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.fault_kinds.runs import endless_base, in_fork, new_run, train, wait_for

if TYPE_CHECKING:
    from benchmarks.fault_kinds.tally import Tally
    from finetune.run.directory import RunDirectory

TOKEN = "token-of-the-benchmark"
CLIENTS = 100
_PROMPT_BYTES = 4 * 2**20 - 200
_HALF_A_HEAD = (b"", b"GET /v1/mod", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
_TOKENS, _ANSWER_TOKENS = 512, 64
#: An answer takes so many times its usual time at most.
_TIMES = 2
#: Answers on either side of it that are usual.
_AROUND = 2


def serve_cases(rng: random.Random, tally: Tally, folder: Path) -> None:
    """Rounds until the tally has its cases or the time is over."""
    run, log = (
        new_run(folder / "run", "max_steps=2", f"model_name_or_path={endless_base(folder / 'base')}"),
        folder / "serve.log",
    )
    if code := train(run):
        tally.fail(f"the run to serve ended with {code}")
        return
    bound = socket.create_server(("127.0.0.1", 0))
    port: int = bound.getsockname()[1]
    server = in_fork(lambda: _serve(run, bound), log)
    bound.close()
    try:
        _answer(port)  # the model is loaded
        hostile = {"silent": _stay_silent, "4 MB prompts": _send_long_prompts, "leaving": _leave}
        ratios: dict[str, list[float]] = {name: [] for name in hostile}
        quiet = [_answer(port) for _ in range(_AROUND)]
        while tally.goes_on:
            problems = []
            for name, clients in hostile.items():
                connections = clients(port, rng)
                took_s = _answer(port)
                for connection in connections:
                    connection.close()
                quiet += [_answer(port) for _ in range(_AROUND)]
                around = quiet[-2 * _AROUND :]
                usual_s = statistics.median(around)
                ratios[name].append(took_s / usual_s)
                if took_s > max(_TIMES * usual_s, *around):
                    problems.append(f"{name}: {took_s:.3f} s, usually {usual_s:.3f}, at most {max(around):.3f}")
            if "Traceback" in log.read_text(encoding="utf-8"):
                problems.append(f"a traceback in {log}")
            if problems:
                tally.fail("; ".join(problems))
            else:
                tally.outcomes["quick"] += 1
        for name, values in ratios.items():
            print(f"{name}: median {statistics.median(values):.2f} and at most {max(values):.2f} of the usual time")
        print(f"usual: median {statistics.median(quiet):.3f} s, at most {max(quiet):.3f} s")
    finally:
        os.kill(server, signal.SIGKILL)
        wait_for(server)


def _serve(run: RunDirectory, bound: socket.socket) -> int:
    from finetune.http_server import serve_until_interrupted
    from finetune.serve.api import build
    from finetune.serve.engine import Engine
    from finetune.serve.models import Models, runs_by_name

    serve_until_interrupted(build(Engine(Models(runs_by_name([run])), tokens=_TOKENS), TOKEN), bound)
    return 0


def _post(port: int, content: str, **options: object) -> http.client.HTTPConnection:
    """Send a request for an answer."""
    body = {"model": "base", "messages": [{"role": "user", "content": content}], "temperature": 0,
            "max_tokens": _ANSWER_TOKENS, **options}  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Authorization": f"Bearer {TOKEN}"})
    return connection


def _answer(port: int) -> float:
    """Seconds until an answer of the usual length has come."""
    began = time.monotonic()
    connection = _post(port, "Where is my parcel?")
    response = connection.getresponse()
    text = response.read()
    if response.status != 200 or json.loads(text)["usage"]["completion_tokens"] != _ANSWER_TOKENS:
        raise SystemExit(f"status {response.status}: {text[:300]!r}")
    connection.close()
    return time.monotonic() - began


def _stay_silent(port: int, rng: random.Random) -> list[socket.socket]:
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(CLIENTS)]
    for connection in connections:
        connection.sendall(rng.choice(_HALF_A_HEAD))
    return connections


def _send_long_prompts(port: int, rng: random.Random) -> list[http.client.HTTPConnection]:
    """The largest body that is read, and the longest text that is tokenised; nobody reads the answers."""
    sizes = (_PROMPT_BYTES, _PROMPT_BYTES, _TOKENS * 256 - 1, _TOKENS * 128)
    return [_post(port, rng.choice(" aä") * (size // 2)) for size in sizes]


def _leave(port: int, rng: random.Random) -> list[socket.socket]:
    for _ in range(CLIENTS):
        connection = _post(port, "Tell me more.", stream=rng.random() < 0.5, max_tokens=200)
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0, 0.05))
        connection.close()
    return []
