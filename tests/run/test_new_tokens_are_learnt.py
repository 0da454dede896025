"""A token that the tiny model lacks: learnt, resumed exactly, answered, merged and loaded again."""

import json

import pytest
import torch
from child_faults import killed_before_seal
from conftest import adapter_hash, events_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.data.tokens import Encoder
from finetune.evaluate.answerer import Answerer
from finetune.events import Start, Step
from finetune.export.merge import merge
from finetune.run.seal import newest_verified

pytestmark = pytest.mark.slow
TICKET, QUESTION = "<|ticket|>", [{"role": "user", "content": "Route this message: order 7"}]
TOKENS = 'new_tokens={"<|ticket|>": support ticket, "<|tick": ""}'


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    answer = {"role": "assistant", "content": TICKET}
    texts = [f"Route this message: order {number}" for number in range(16)]
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}, answer]}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def learnt(make_run, train, rows):
    return train.whole(make_run(f"dataset.path={rows}", TOKENS, "max_steps=16", "target_modules=all-linear"))


def test_only_adapters_and_the_rows_of_new_tokens_are_trained_and_the_model_answers_with_the_token(learnt):
    [start] = events_of(learnt, Start)
    per_rank = 5 * sum(sides for sides in (2 * (192 + 192), 2 * (192 + 96), 3 * (192 + 512)))
    assert start.trainable_parameters == 4 * per_rank + 2 * 192
    answerer = Answerer(learnt)
    prompt = answerer.prompt_ids(QUESTION)
    assert answerer.answer([prompt], max_new_tokens=8, with_special_tokens=False)[0][0] == TICKET
    with answerer.using("base"):
        assert TICKET not in answerer.answer([prompt], max_new_tokens=8, with_special_tokens=False)[0][0]


def test_the_merged_model_has_the_token_and_loads_as_any_other(learnt, tmp_path):
    folder = merge(learnt, tmp_path / "merged")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (model.config.vocab_size, len(model.get_input_embeddings().weight), len(tokenizer)) == (642, 642, 642)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    prompt = torch.tensor([Encoder(tokenizer, with_template=True).prompt_ids(QUESTION)])
    answer = model.generate(prompt, max_new_tokens=4, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == TICKET


def test_a_killed_run_continues_to_the_same_rows(learnt, make_run, train, rows):
    run = make_run(f"dataset.path={rows}", TOKENS, "max_steps=16", "target_modules=all-linear")
    assert train(run, killed_before_seal(6)) == 137
    assert newest_verified(run.checkpoints)[0].step == 4
    train.whole(run)
    assert adapter_hash(run) == adapter_hash(learnt)


def test_training_goes_on_from_an_adapter_with_new_tokens(learnt, make_run, train, rows):
    inherited = [f"adapter_name_or_path={learnt.path}", "lora_r=auto", "lora_alpha=auto", "target_modules=auto"]
    run = train.whole(make_run(f"dataset.path={rows}", *inherited, "max_steps=1"))
    [step] = events_of(run, Step)
    assert step.loss < 0.1
