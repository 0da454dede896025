"""New tokens of a recipe: which are refused, how text is cut with them, and the rows that they have."""

import pytest
from small_data import build_tokenizer, recipe

from finetune.data.tokenizer import add_tokens, rows_of_tokens
from finetune.data.tokens import Encoder
from finetune.errors import RecipeError


def with_tokens(new_tokens, **settings):
    tokenizer = build_tokenizer(**settings)
    add_tokens(tokenizer, recipe("rows.jsonl", new_tokens=new_tokens))
    return tokenizer


@pytest.mark.parametrize(
    ("new_tokens", "message"),
    [
        (["<a>", "<a>"], "has <a> more than once"),
        ([""], "'' is no token"),
        (["  "], "'  ' is no token"),
        ([" ticket"], "white space at its ends"),
        (["a\nb"], "printable"),
        (["a\ud800"], "printable"),
        (["x" * 201], "at most 200 characters"),
        ([7], "give a list of tokens"),
        ({"<a>": 7}, "new_tokens.<a> is 7"),
        ([["<a>"]], "give a list of tokens"),
        ({"<a>": "ticket", "": ""}, "'' is no token"),
    ],
)
def test_text_that_is_no_token_is_refused(new_tokens, message):
    with pytest.raises(RecipeError, match=message):
        recipe("rows.jsonl", new_tokens=new_tokens)


@pytest.mark.parametrize("name", ["<|im_end|>", "a", "é"])
def test_a_token_that_the_model_has_is_refused(name):
    tokenizer = build_tokenizer(extra=("é",))
    with pytest.raises(RecipeError, match="is a token of tiny already"):
        add_tokens(tokenizer, recipe("rows.jsonl", new_tokens=["<|new|>", name]))


def test_the_longest_of_several_new_tokens_is_taken():
    tokenizer = with_tokens(["<|tick", "<|ticket|>", "日本"])
    ids = tokenizer("日本<|ticket|><|tick|>", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:3] == ["日本", "<|ticket|>", "<|tick"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "日本<|ticket|><|tick|>"


def test_a_new_token_in_a_users_text_is_that_token_and_a_special_one_is_text():
    tokenizer = with_tokens(["<|ticket|>"])
    [ticket, end] = tokenizer.convert_tokens_to_ids(["<|ticket|>", "<|im_end|>"])
    ids = Encoder(tokenizer, conversations=True).prompt_ids([{"role": "user", "content": "<|ticket|> <|im_end|>"}])
    assert (ids.count(ticket), ids.count(end)) == (1, 1)


def test_ten_thousand_tokens_have_rows_of_their_own():
    names = [f"<|{number}|>" for number in range(10_000)]
    tokenizer = with_tokens(names)
    before = len(tokenizer) - 10_000
    assert rows_of_tokens(tokenizer, recipe("rows.jsonl", new_tokens=names), before, highest=5) == [before, before + 10_000]
    assert tokenizer("".join(names), add_special_tokens=False)["input_ids"] == list(range(before, before + 10_000))


@pytest.mark.parametrize(
    ("new_tokens", "more_rows", "highest", "rows"),
    [
        ([], 0, 3, []),  # all tokens are the model's
        ([], -2, 3, []),  # two are not, and no row has one
        ([], -2, -1, [-2, 0]),  # rows are counted from the tokenizer's own end
        (["<a>"], 0, 3, [0, 1]),
        (["<a>"], 50, 3, [0, 1]),  # a padded vocabulary
        (["<a>"], -2, 3, [-2, 1]),
    ],
)
def test_rows_of_new_tokens_follow_the_models_own(new_tokens, more_rows, highest, rows):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<x>", "<y>"])
    end = len(tokenizer)
    wanted = recipe("rows.jsonl", new_tokens=new_tokens)
    add_tokens(tokenizer, wanted)
    seen = rows_of_tokens(tokenizer, wanted, end + more_rows, highest if highest >= 0 else end - 1)
    assert seen == [end + row for row in rows]
