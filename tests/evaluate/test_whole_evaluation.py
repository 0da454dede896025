"""A run's evaluation from end to end: it equals transformers and PEFT row by row, and a kill loses nothing."""

import gc
import json
import math
import os
import re
from dataclasses import asdict

import pytest
import torch
from datasets import load_from_disk
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.bundled import model_path
from finetune.errors import DataError
from finetune.evaluate.answerer import ANSWER_TOKENS
from finetune.evaluate.results import Journal
from finetune.evaluate.score import compare
from finetune.evaluate.scorers import scorer
from finetune.run.directory import RunDirectory

pytestmark = pytest.mark.slow


@pytest.fixture
def run(home, kept_run):
    return RunDirectory(kept_run(home))


def without_time(result):
    return {**asdict(result), "seconds": 0, "reused": 0}


def test_answers_and_losses_are_those_of_transformers_and_peft_row_by_row(run):
    comparison = compare(run, score=scorer("json"))
    tokenizer = AutoTokenizer.from_pretrained(run.data / "tokenizer")
    model = AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(run.adapter)).eval()
    rows, tokenised = json.loads((run.data / "eval_examples.json").read_text()), load_from_disk(str(run.data / "eval"))
    answers, total, right, tokens = [], 0.0, 0, 0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["prompt_ids"]])
            stops = [tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.eos_token_id]
            output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64,
                                 eos_token_id=stops, pad_token_id=tokenizer.pad_token_id)  # fmt: skip
            answers.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
        for row in tokenised:
            labels = torch.tensor(row["labels"])[1:]
            log_probabilities = model(torch.tensor([row["input_ids"]])).logits[0, :-1].log_softmax(-1)
            for index, label in enumerate(labels.tolist()):
                if label != -100:
                    total, tokens = total - log_probabilities[index, label].item(), tokens + 1
                    right += log_probabilities[index].argmax().item() == label
    assert comparison.tuned.answers == answers
    assert comparison.tuned.loss == pytest.approx(total / tokens, rel=1e-4)
    assert comparison.tuned.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-3)
    assert comparison.tuned.token_accuracy == right / tokens
    assert comparison.tuned.exact == [answer == row["answer"] for answer, row in zip(answers, rows, strict=True)]


def test_an_evaluation_killed_at_ten_moments_ends_with_the_same_scores(run, monkeypatch):
    monkeypatch.setitem(ANSWER_TOKENS, "cpu", 200)  # several batches
    complete = without_time(compare(run))
    [*journals] = (run.path / "evaluations").iterdir()
    for path in journals:
        path.unlink()
    gc.freeze()
    for moment in range(1, 11):
        child = os.fork()
        if not child:
            remaining, add = [moment], Journal.add

            def count(self, entries, remaining=remaining, add=add):
                remaining[0] -= 1
                if remaining[0] < 0:
                    os._exit(9)
                add(self, entries)

            Journal.add = count
            compare(run)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (9, 0)  # not os.wait(): other tests have children, too
    repeated = compare(run)
    assert without_time(repeated) == complete
    assert repeated.reused == 24 == compare(run, score=scorer("contains")).reused  # 6 answers and 6 losses of each model


def test_rows_of_a_file_are_scored_with_errors_reported_first_and_those_that_were_trained_on_counted(run, home):
    rows = [json.loads(line) for line in OWN.splitlines()]
    (home / "own.jsonl").write_text(OWN)
    comparison = compare(run, data="own.jsonl", score=scorer("json"))
    assert (comparison.rows, comparison.data, len(comparison.tuned.row_losses)) == (2, "own.jsonl", 2)
    assert comparison.references == [row["completion"] for row in rows]
    with pytest.raises(DataError, match="row 2: the expected answer has no number"):
        compare(run, data="own.jsonl", score=scorer("numeric"))
    (home / "text.jsonl").write_text('{"text": "Only words."}\n')
    with pytest.raises(DataError, match="--score loss|plain text"):
        compare(run, data="text.jsonl", score=scorer("exact"))
    of_text = compare(run, data="text.jsonl")
    assert of_text.score == "loss" and of_text.tuned.loss > 0
    (home / "bad.jsonl").write_text(OWN + '{"prompt": "x", "completion": 7}\n')
    with pytest.raises(DataError, match="row 3"):
        compare(run, data="bad.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(run.data / "tokenizer")
    trained = load_from_disk(str(run.data / "train"))["input_ids"][:3]
    texts = [*map(tokenizer.decode, trained), "<|user|>a<|assistant|>b"]
    turns = [re.findall(r"<\|(user|assistant)\|>(.*?)(?:<\|end\|>|(?=<\|assistant)|$)", text) for text in texts]
    rows = [{"messages": [{"role": role, "content": content} for role, content in row]} for row in turns]
    (home / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert compare(run, data="mixed.jsonl").trained_rows == 3
    assert compare(run).trained_rows == 0


OWN = '{"prompt": "Two?", "completion": "{\\"n\\": 2}"}\n{"prompt": "None?", "completion": "{}"}\n'
