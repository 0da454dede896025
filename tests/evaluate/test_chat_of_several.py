"""Several adapters answer in one chat without loading their base model again, and the KV cache is known before any is."""

import io
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from finetune.cli import main
from finetune.errors import CommandError
from finetune.evaluate.answerer import Answerer
from finetune.evaluate.room import ChatMemory, cache_token_bytes, chat_memory, token_bytes
from finetune.plan.plan import read_plan
from finetune.run.directory import RunDirectory


def test_what_does_not_fit_or_is_not_known_is_said():
    assert ChatMemory(2**30, 2**20, 300, 2**31).in_words() == "model 1.00 GiB, KV cache of 300 tokens 1 MiB; 2.00 GiB free"
    assert ChatMemory(2**31, 2**20, 300, 2**31).in_words().endswith("it may not fit")
    assert "KV cache of 300 tokens not known" in ChatMemory(None, None, 300, 2**31).in_words()


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
    each = cache_token_bytes(plan.settings)
    assert each == token_bytes(Answerer(runs[0]).model, "cpu")
    made = chat_memory(plan, 100)
    assert made.cache_bytes == each * (plan.settings.max_length + 100) and made.fits


@pytest.mark.slow
def test_each_adapter_answers_as_it_does_alone(runs):
    ids = Answerer(runs[0]).prompt_ids([{"role": "user", "content": "Where is my parcel?"}])

    def answer(answerer, model="tuned"):
        with answerer.using(model):
            return answerer.answer([ids], max_new_tokens=24)

    first = Answerer(runs[0])
    second = first.beside(runs[1])
    alone = Answerer(runs[1])
    assert second.model is first.model
    for _ in range(2):
        assert answer(first) == answer(Answerer(runs[0])) and answer(second) == answer(alone)
        assert answer(second, "base") == answer(first, "base") == answer(alone, "base")
    assert len({str(answer(one)) for one in (first, second)}) == 2
    values = json.loads(runs[1].plan.read_text())
    values["plan"]["dtype"] = "bfloat16"
    runs[1].plan.write_text(json.dumps(values))
    with pytest.raises(CommandError, match="another form of it"):
        first.beside(runs[1])


@pytest.mark.slow
def test_in_the_terminal_use_changes_who_answers(runs, monkeypatch, capsys):
    def chat(*arguments, lines=()):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
        monkeypatch.setattr("sys.argv", ["finetune", "chat", *arguments, "--max-new-tokens", "4"])
        code = main()
        return code, capsys.readouterr()

    code, said = chat("finished", "second", "--prompt", "Where is my parcel?", "--json")
    answers = [json.loads(line) for line in said.out.splitlines()]
    assert code == 0 and [answer["run"] for answer in answers] == ["runs/finished", "runs/second"]
    code, said = chat("finished", "second", lines=["Hello", "/use third", "/use second", "Hello"])
    assert code == 0 and "there is no third in this chat; finished answers" in said.err and "second answers" in said.err
    assert "KV cache of" in said.err
