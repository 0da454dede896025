"""Token lengths give the same trained tokens as the tokenizer's own offsets."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_data import CHATML, build_tokenizer, talk
from tokenizers import normalizers, pre_tokenizers, processors

from finetune.bundled import model_path
from finetune.data.byte_level import ByteLevel
from finetune.data.formats import parse
from finetune.data.tokens import Encoder

WORDS = ["Hi", " ", "  ", "\n", "\t", "\xa0", "é", "e\u0301", "🙂", "👩‍👩‍👧", "日本", "4", "</s>", "<|im_end|>", "don't", "?"]
SETTINGS = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def tokenizer_of(*, trims, nfc):
    tokenizer = build_tokenizer(CHATML, bos=True)
    if trims:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    if nfc:
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


TOKENIZERS = [tokenizer_of(trims=trims, nfc=nfc) for trims in (False, True) for nfc in (False, True)]


@pytest.mark.slow
@settings(max_examples=100, **SETTINGS)
@given(turns=st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map("".join), min_size=2, max_size=4))
def test_rows_are_the_same_as_with_the_tokenizers_offsets(turns):
    turns = [turn if turn.strip() else f"{turn}x" for turn in turns[: len(turns) // 2 * 2]]
    example = parse(talk(*turns), "messages", "rows.jsonl", 1)
    for tokenizer in TOKENIZERS:
        fast, slow = Encoder(tokenizer), Encoder(tokenizer)
        slow._byte_level = None
        [[by_lengths]], [[by_offsets]] = fast.encode([example]), slow.encode([example])
        assert by_lengths.input_ids.tolist() == by_offsets.input_ids.tolist()
        assert by_lengths.labels.tolist() == by_offsets.labels.tolist() and by_lengths.notes == by_offsets.notes


def test_it_is_used_for_byte_level_tokenizers_that_change_no_text():
    from transformers import AutoTokenizer

    assert all(ByteLevel.of(tokenizer) for tokenizer in [*TOKENIZERS, AutoTokenizer.from_pretrained(model_path("tiny"))])
    unsuitable = build_tokenizer()
    unsuitable.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert ByteLevel.of(unsuitable) is None
    unsuitable = build_tokenizer()
    unsuitable.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert ByteLevel.of(unsuitable) is None


@pytest.mark.parametrize("text", ["", "e\u0301"])
def test_a_text_that_its_tokens_do_not_add_up_to_has_no_mask(text):
    byte_level = ByteLevel.of(TOKENIZERS[1])
    [ids] = byte_level.ids([text])
    assert byte_level.trained_mask(ids, text, [(0, 1)]) is None
