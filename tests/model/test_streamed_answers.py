"""A streamed answer is the greedy one in pieces, sampling repeats with its seed, and a stop ends it at once."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from finetune.bundled import model_path
from finetune.model.generate import Sampling, _Pieces, greedy_answers, streamed_answer


@pytest.fixture(scope="module")
def model_and_tokenizer():
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny"))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).eval(), tokenizer


def stream(model_and_tokenizer, most=40, **options):
    pieces, defaults = [], {"sampling": Sampling(), "stopped": lambda: False, "with_special_tokens": False, "more_inputs": None}
    answer = streamed_answer(
        *model_and_tokenizer, [5, 6, 7], stops={0}, max_new_tokens=most, on_text=pieces.append, **defaults | options
    )
    return answer, pieces


def test_the_pieces_are_the_greedy_answer_whole_characters_and_a_seed_repeats_its_own(model_and_tokenizer):
    answer, pieces = stream(model_and_tokenizer)
    options = {"stops": {0}, "max_new_tokens": 40, "with_special_tokens": False, "more_inputs": None}
    assert "".join(pieces) == answer.text == greedy_answers(*model_and_tokenizer, [[5, 6, 7]], **options)[0][0]
    assert len(pieces) > 5 and answer.tokens == 40 and not answer.stopped and answer.tokens_per_s > 0
    texts = [stream(model_and_tokenizer, sampling=Sampling(1.0, 0.95, seed))[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    chance = torch.Generator().manual_seed(3)
    drawn = [torch.randint(0, len(model_and_tokenizer[1]), (30,), generator=chance).tolist() for _ in range(20)]
    text = "Grüße 🙂 für 3 €"
    for ids in [model_and_tokenizer[1](text, add_special_tokens=False)["input_ids"], *drawn]:
        passed = []
        pieces = _Pieces(model_and_tokenizer[1], passed.append, with_special=False)
        pieces.put(torch.tensor([[1, 2]]))
        for token in ids:
            pieces.put(torch.tensor([token]))
        whole = pieces.finish(ids)
        assert "".join(passed) == whole
        assert ids in drawn or (whole == text and not any("\ufffd" in piece for piece in passed))


@pytest.mark.parametrize("after", [1, 3])
def test_a_stop_ends_the_answer_at_the_next_token(model_and_tokenizer, after):
    calls = []
    answer, pieces = stream(model_and_tokenizer, stopped=lambda: calls.append(1) or len(calls) >= after)
    assert (answer.tokens, answer.stopped) == (after, True) and "".join(pieces) == answer.text
