"""Several adapters answer in one chat on one base model, and the bytes of the KV cache are known before it is loaded."""

import io
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from finetune.cli import main
from finetune.errors import CommandError
from finetune.evaluate.answerer import Answerer, require_shared_base
from finetune.evaluate.kv_cache import ChatMemory, cache_token_bytes, chat_memory, token_bytes
from finetune.planner.plan import read_plan
from finetune.run.directory import RunDirectory


def test_memory_that_does_not_fit_or_is_unknown_is_reported():
    assert ChatMemory(2**30, 2**20, 300, 2**31).summary() == "model 1.00 GiB, KV cache of 300 tokens 1 MiB; 2.00 GiB free"
    assert ChatMemory(2**31, 2**20, 300, 2**31).summary().endswith("it may not fit")
    assert "KV cache of 300 tokens unknown" in ChatMemory(None, None, 300, 2**31).summary()


@pytest.fixture
def runs(home, kept_run):
    """Two runs of one base; the second one's adapter is much stronger."""
    first = kept_run(home / "runs")
    shutil.copytree(first, home / "runs" / "second")
    path = home / "runs" / "second" / "adapter" / "adapter_model.safetensors"
    save_file({name: 9 * values for name, values in load_file(path).items()}, path)
    return RunDirectory(first), RunDirectory(home / "runs" / "second")


@pytest.mark.slow
def test_the_bytes_of_the_cache_are_those_of_the_loaded_model(runs):
    plan = read_plan(runs[0].plan)
    bytes_per_token = cache_token_bytes(plan.settings)
    assert bytes_per_token == token_bytes(Answerer(runs[0]).model, "cpu")
    memory = chat_memory(plan, 100)
    assert memory.cache_bytes == bytes_per_token * (plan.settings.max_length + 100) and memory.fits


@pytest.mark.slow
def test_each_adapter_answers_as_it_does_alone(runs):
    ids = Answerer(runs[0]).prompt_ids([{"role": "user", "content": "Where is my parcel?"}])

    def answer(answerer, model="tuned"):
        with answerer.using(model):
            return answerer.answer([ids], max_new_tokens=24)

    first = Answerer(runs[0])
    second = first.sharing_base(runs[1])
    alone = Answerer(runs[1])
    assert second.model is first.model
    for _ in range(2):
        assert answer(first) == answer(Answerer(runs[0])) and answer(second) == answer(alone)
        assert answer(second, "base") == answer(first, "base") == answer(alone, "base")
    assert len({str(answer(each_answerer)) for each_answerer in (first, second)}) == 2


@pytest.mark.parametrize(("setting", "value"), [("dtype", "bfloat16"), ("vision", True)])
def test_another_form_of_the_base_is_not_shared(runs, setting, value):
    values = json.loads(runs[1].plan.read_text())
    values["plan"][setting] = value
    runs[1].plan.write_text(json.dumps(values))
    with pytest.raises(CommandError, match=f"another form of it: they differ in .*{setting}"):
        require_shared_base(runs[1], runs[0])


@pytest.mark.slow
def test_in_the_terminal_use_changes_who_answers(runs, monkeypatch, capsys):
    def chat(*arguments, lines=()):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
        monkeypatch.setattr("sys.argv", ["finetune", "chat", *arguments, "--max-new-tokens", "4"])
        code = main()
        return code, capsys.readouterr()

    code, output = chat("finished", "second", "--prompt", "Where is my parcel?", "--json")
    answers = [json.loads(line) for line in output.out.splitlines()]
    assert code == 0 and [answer["run"] for answer in answers] == ["runs/finished", "runs/second"]
    code, output = chat("finished", "second", lines=["Hello", "/use third", "/use second", "Hello"])
    assert code == 0 and "there is no third in this chat; finished answers" in output.err and "second answers" in output.err
    assert "KV cache of" in output.err
