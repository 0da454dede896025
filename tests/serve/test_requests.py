"""What a client may ask, where an answer stops, and who waits."""

import asyncio
import json
import threading

import pytest

from finetune.errors import CommandError, OutOfMemory
from finetune.model.generate import Streamed
from finetune.serve.engine import Ended, Engine, UntilStop
from finetune.serve.requests import RequestError, read_request

ASKED = {"model": "base", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("stops", "pieces", "said"),
    [
        ([], ["a", "b"], "ab"),
        (["STOP"], ["one S", "TO", "P two"], "one "),
        (["STOP"], ["one S", "TO", "NE"], "one STONE"),
        (["b", "ab"], ["aab"], "a"),
        (["aab"], ["aa", "ab"], "a"),
        (["\n\n"], ["x\n", "y\n", "\nz"], "x\ny"),
    ],
)
def test_an_answer_ends_before_a_stop_however_it_is_cut_into_pieces(stops, pieces, said):
    heard = []
    until = UntilStop(stops, heard.append)
    for piece in pieces:
        until.add(piece)
    until.finish()
    assert "".join(heard) == said and until.found == any(stop in "".join(pieces) for stop in stops)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"seed": "one"}, "seed"),
        ({"stop": ["a", ""]}, "stop"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"temprature": 0.5}, "temprature"),
    ],
)
def test_what_can_not_be_respected_is_refused_by_name(change, param):
    with pytest.raises(RequestError) as refused:
        read_request({**ASKED, **change})
    assert refused.value.status == 400 and refused.value.as_json()["error"]["param"] == param


def test_fields_without_effect_are_accepted_and_the_rest_is_respected():
    body = {"n": 1, "user": "me", "presence_penalty": 0, "tools": None, "response_format": {"type": "text"}, "seed": 4}
    asked = read_request({**ASKED, **body, "temperature": 0, "max_tokens": 5, "max_completion_tokens": 7, "stop": "x"})
    assert (asked.most_tokens, asked.stops, asked.sampling.temperature, asked.sampling.seed) == (7, ["x"], 0.0, 4)
    assert read_request(ASKED).sampling.temperature == 1.0
    parts = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert read_request({**ASKED, "messages": parts}).messages[0].as_trained() == {"role": "system", "content": "ab"}


class OneWord:
    """Answers a word for each permit, and notes who was answered and who was stopped."""

    names = ["base"]

    def __init__(self):
        self.go, self.answered, self.stopped = threading.Semaphore(0), [], []

    def prompt_ids(self, name, messages):
        return [1] * len(messages[-1]["content"])

    def stream(self, name, question, *, most_tokens, sampling, say, stopped):
        for made in range(most_tokens):
            while not self.go.acquire(timeout=0.01):
                if stopped():
                    self.stopped.append(sampling.seed)
                    return Streamed("", made, 1.0, True)
            say("word ")
        self.answered.append(sampling.seed)
        return Streamed("", most_tokens, 1.0, False)


def test_requests_are_answered_in_order_a_client_that_leaves_frees_its_place_and_the_queue_ends():
    async def whole(engine, **body):
        return [piece async for piece in await engine.begin(read_request({**ASKED, **body}))]

    async def story(models, engine):
        leaves = asyncio.create_task(whole(engine, seed=1, max_tokens=9))
        others = [asyncio.create_task(whole(engine, seed=seed, max_tokens=2)) for seed in (2, 3)]
        models.go.release()
        await asyncio.sleep(0.05)
        with pytest.raises(RequestError) as refused:
            await whole(engine)
        assert refused.value.status == 429
        leaves.cancel()
        while not models.stopped:
            await asyncio.sleep(0.01)
        models.go.release(4)
        assert await asyncio.gather(*others) == [["word ", "word ", Ended("length", 2, 2)]] * 2

    models = OneWord()
    engine = Engine(models, tokens=20, most_waiting=2)
    asyncio.run(story(models, engine))
    engine.close()
    assert (models.stopped, models.answered) == ([1], [2, 3])


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "other"}, 404, "model_not_found"),
        ({"max_tokens": 19}, 400, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * 20}]}, 400, "context_length_exceeded"),
    ],
)
def test_what_this_server_has_no_room_or_no_model_for(body, status, code):
    engine = Engine(OneWord(), tokens=20)
    with pytest.raises(RequestError) as refused:
        asyncio.run(engine.begin(read_request({**ASKED, **body})))
    assert (refused.value.status, refused.value.code) == (status, code)


@pytest.fixture
def two_runs(home, kept_run):
    from finetune.run.directory import RunDirectory

    first = kept_run(home)
    second = first.rename(home / "second")
    return [RunDirectory(kept_run(home)), RunDirectory(second)]


def change_adapter(run, **values):
    path = run.adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("values", "rank"),
    [({"r": 4}, 8), ({"r": 16}, 16), ({"r": 8, "rank_pattern": {"q_proj": 33}}, 64), ({"r": 300}, 320)],
)
def test_the_rank_printed_for_vllm_is_one_that_it_accepts_and_no_smaller(two_runs, values, rank):
    from finetune.serve import elsewhere
    from finetune.serve.models import named

    change_adapter(two_runs[1], **values)
    command = elsewhere.vllm_command(named(two_runs)).split()
    assert command[command.index("--max-lora-rank") + 1] == str(rank) and "--max-loras 2" in " ".join(command)
    assert command[-2:] == [f"{run.path.name}={run.adapter.resolve()}" for run in two_runs]


def test_vllm_can_not_load_dora_and_names_must_differ(two_runs):
    from finetune.serve import elsewhere
    from finetune.serve.models import named

    change_adapter(two_runs[0], use_dora=True)
    with pytest.raises(CommandError, match="no DoRA"):
        elsewhere.vllm_command(named(two_runs))
    with pytest.raises(CommandError, match="would be called"):
        named([two_runs[0], two_runs[0]])


def test_what_fits_is_counted_before_loading(two_runs, monkeypatch):
    import psutil

    from finetune.model.transformers_config import load_config
    from finetune.plan.plan import read_plan
    from finetune.serve.room import room

    settings = read_plan(two_runs[0].plan).settings
    config = load_config(settings)
    made = room(settings, config, on_cpu=True)
    assert made.token_bytes == 2 * 5 * 3 * 32 * 4 and made.tokens == 512  # K and V, layers, heads, their size, float32
    assert room(settings, config, on_cpu=True, context=100).tokens == 100

    class Little:
        available = made.weight_bytes + 2**29 + 300 * 3840

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Little)
    assert room(settings, config, on_cpu=True).tokens == 300
    with pytest.raises(OutOfMemory, match="KV cache"):
        room(settings, config, on_cpu=True, context=400)


def test_of_the_offloaded_layers_only_two_are_counted_on_a_card(two_runs):
    from finetune.model.build import build_base
    from finetune.model.transformers_config import load_config
    from finetune.plan.plan import read_plan
    from finetune.serve.room import _away_bytes

    settings = read_plan(two_runs[0].plan).settings
    model = build_base(settings, load_config(settings), device="meta", weights=False)
    matrices = 4 * (2 * 192 * 192 + 2 * 96 * 192 + 3 * 192 * 512)  # float32: attention, MLP
    assert [_away_bytes(model, count) for count in (2, 3, 5)] == [0, matrices, 3 * matrices]
