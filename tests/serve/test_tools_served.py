"""Tools, calls and their replies over HTTP: the `openai` client and a model that has learnt calls by heart."""

import copy
import json
import random
import subprocess
import sys
import threading

import calls_run
import pytest

openai = pytest.importorskip("openai", reason="no openai; pip install openai")
pytestmark = pytest.mark.slow

TOKEN = "token-of-the-test-1234"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return calls_run.make(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def served(run):
    """URL of a server with `calls`, and its engine."""
    import uvicorn

    from finetune.run.directory import RunDirectory
    from finetune.serve.api import build
    from finetune.serve.engine import Engine
    from finetune.serve.models import Models, runs_by_name
    from finetune.system import port_socket

    engine, bound = Engine(Models(runs_by_name([RunDirectory(run)])), tokens=512), port_socket()
    bound.bind(("127.0.0.1", 0))
    bound.listen()
    server = uvicorn.Server(uvicorn.Config(build(engine, TOKEN), log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    yield f"http://127.0.0.1:{bound.getsockname()[1]}", engine
    server.should_exit = True
    thread.join()
    engine.close()


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=f"{served[0]}/v1", api_key=TOKEN, max_retries=0)


def ask(client, messages, **options):
    options = {"tools": calls_run.TOOLS, "temperature": 0, "max_tokens": 100, **options}
    return client.chat.completions.create(model="calls", messages=messages, **options)


def answer(client, messages, **options):
    choice = ask(client, messages, **options).choices[0]
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]
    return choice.message.content, calls, choice.finish_reason


def test_a_call_parallel_calls_and_no_call(client):
    assert answer(client, calls_run.ONE[:1]) == (None, [("weather", {"city": "Bern", "days": 2})], "tool_calls")
    two = [("weather", {"city": "Oslo"}), ("time", {"city": "Oslo"})]
    assert answer(client, calls_run.TWO[:1]) == ("Sure.", two, "tool_calls")
    assert answer(client, calls_run.TWO[:1], parallel_tool_calls=False)[1] == two[:1]
    assert answer(client, calls_run.NO_CALL[:1]) == ("Good morning to you.", [], "stop")


def test_the_reply_of_a_tool_is_answered(client):
    message = ask(client, calls_run.ONE[:1]).choices[0].message
    reply = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    assert answer(client, [calls_run.ONE[0], message, reply]) == ("It rains in Bern.", [], "stop")


@pytest.mark.parametrize("conversation", [calls_run.ONE, calls_run.TWO, calls_run.NO_CALL, calls_run.BROKEN])
def test_streamed_deltas_join_to_the_same_answer(client, conversation):
    content, calls, reason = "", {}, None
    for chunk in ask(client, conversation[:1], stream=True):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        content += delta.content or ""
        for piece in delta.tool_calls or ():
            entry = calls.setdefault(piece.index, ["", ""])
            entry[0] += piece.function.name or ""
            entry[1] += piece.function.arguments
            assert bool(piece.id) == bool(piece.function.name)
    joined = [(name, json.loads(arguments)) for name, arguments in calls.values()]
    whole = answer(client, conversation[:1])
    assert (content, joined, reason) == (whole[0] or "", whole[1], whole[2])


def test_a_call_that_can_not_be_read_stays_text_and_is_counted(served, client):
    before = served[1].unreadable_calls
    content, calls, reason = answer(client, calls_run.BROKEN[:1])
    assert content.startswith('<tool_call>{"name": "weather"') and (calls, reason) == ([], "stop")
    assert served[1].unreadable_calls == before + 1


def test_tool_choice_is_respected(client):
    none = answer(client, calls_run.ONE[:1], tool_choice="none")
    assert none[1] == [] and none[2] != "tool_calls"
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        assert answer(client, calls_run.ONE[:1], tool_choice=choice)[1] == [("weather", {"city": "Bern", "days": 2})]
    content, calls, _ = answer(client, calls_run.NO_CALL[:1], tool_choice={"type": "function", "function": {"name": "time"}})
    assert calls[:1] == [] and content.startswith('<tool_call>{"name": "time') or calls[0][0] == "time"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": calls_run.TOOLS * 2}, "tools"),
        ({"messages": [{"role": "tool", "tool_call_id": "x", "content": "1"}]}, "messages"),
        ({"messages": [calls_run.user("x"), {"role": "assistant", "content": None}]}, "messages.1"),
        ({"functions": [{"name": "x"}]}, "functions"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(client, change, param):
    options = {"messages": calls_run.ONE[:1], **change}
    options["tools"] = options.get("tools", calls_run.TOOLS) or openai.NOT_GIVEN
    functions = {"extra_body": {"functions": options.pop("functions")}} if "functions" in options else {}
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, **options, **functions)
    assert error.value.param == param


def test_chat_shows_calls_and_takes_what_the_tool_answers(run, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(calls_run.TOOLS))
    command = [sys.executable, "-m", "finetune", "chat", str(run), "--tools", str(tools)]
    options = {"input": "Weather in Bern?\nrain\n", "capture_output": True, "text": True, "check": True}
    printed = subprocess.run(command, **options).stdout
    assert 'calls weather({"city": "Bern", "days": 2})\nIt rains in Bern.' in printed and "<tool_call>" not in printed
    first, second = map(json.loads, subprocess.run([*command, "--json"], **options).stdout.splitlines())
    assert [call["function"]["name"] for call in first["calls"]] == ["weather"]
    assert (second["answer"], second["calls"]) == ("It rains in Bern.", [])


SCHEMA = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize("model", ["base", "calls"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_its_schema_with_base_and_adapter(client, model, stream):
    pytest.importorskip("llguidance", reason="no llguidance; pip install 'llguidance>=1.9,<2'")
    options = {"model": model, "messages": calls_run.NO_CALL[:1], "max_tokens": 300, "temperature": 1, "seed": 3}
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    answered = client.chat.completions.create(**options, response_format=form, stream=stream)
    text = (
        "".join(piece.choices[0].delta.content or "" for piece in answered) if stream else answered.choices[0].message.content
    )
    value = json.loads(text)
    assert value.keys() == {"city", "days"} and len(value["city"]) <= 9 and value["days"] <= 9


def test_a_schema_that_can_not_be_used_is_refused(client):
    pytest.importorskip("llguidance", reason="no llguidance; pip install 'llguidance>=1.9,<2'")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="calls", messages=calls_run.NO_CALL[:1], response_format=form)
    assert error.value.param == "response_format" and "Invalid type" in error.value.message


JUNK = [
    None,
    3,
    -1,
    1e400,
    "",
    "x",
    [],
    {},
    [[]],
    [3],
    {"a": None},
    True,
    "\u0000",
    "<|end|>",
    {"type": "function"},
    [{}],
    "{" * 50,
]
VALID = {
    "model": "calls", "max_tokens": 2, "temperature": 0, "tools": calls_run.TOOLS, "tool_choice": "auto",
    "messages": [
        calls_run.user("Weather in Bern?"),
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ],
}  # fmt: skip


def paths(value, prefix=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*prefix, key)
        yield from paths(item, (*prefix, key))


def test_two_hundred_fuzzed_requests_are_refused_with_one_sentence(served):
    import httpx

    source, refused, where = random.Random(0), 0, list(paths(VALID))
    with httpx.Client(base_url=served[0], headers={"authorization": f"Bearer {TOKEN}"}, timeout=60) as http:
        for _ in range(2_000):
            body = copy.deepcopy(VALID)
            for path in source.sample(where, source.choice([1, 1, 2, 4])):
                target = body
                try:
                    for key in path[:-1]:
                        target = target[key]
                    target[path[-1]] = source.choice(JUNK)
                except (KeyError, IndexError, TypeError):
                    continue
            if "model" in body and isinstance(body["model"], str) and body["model"] != "calls":
                continue  # 404
            answered = http.post("/v1/chat/completions", content=json.dumps(body, ensure_ascii=False).encode())
            assert answered.status_code in (200, 400), (answered.status_code, body)
            if answered.status_code == 400:
                message = answered.json()["error"]["message"]
                assert message and len(message) < 500 and "\n" not in message and "Traceback" not in message, message
                refused += 1
            if refused == 200:
                return
    raise AssertionError(f"only {refused} of the requests were refused")
