"""A model's tokenizer is complete, or the error says what is missing; new tokens are refused or have their own rows."""

import json

import pytest
from small_data import CHATML, build_tokenizer, recipe

from finetune.data.tokenizer import add_tokens, choose_pad, load_tokenizer, read_tokenizer, trained_embedding_rows
from finetune.data.tokens import Encoder
from finetune.errors import DataError, RecipeError
from finetune.planner.planning import encode_rows


def load(model, **settings):
    return load_tokenizer(recipe("rows.jsonl", model_name_or_path=str(model), **settings))


def recipe_problem(model, **settings):
    with pytest.raises(RecipeError) as error:
        load(model, **settings)
    return " ".join([*error.value.problems, error.value.fix])


def test_a_saved_tokenizer_comes_back_with_its_template_and_padding_is_never_an_end_token(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = load(tmp_path)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.pad_token == "<pad>"
    tokenizer = build_tokenizer(pad_token="</s>")
    choose_pad(tokenizer)
    assert tokenizer.pad_token == "<pad>"
    tokenizer = build_tokenizer(pad_token=None)
    choose_pad(tokenizer)
    assert (tokenizer.pad_token, len(tokenizer)) == ("<pad>", len(build_tokenizer()))


def test_a_folder_without_tokenizer_and_one_that_is_not_there_are_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert "no vocabulary" in recipe_problem(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert "no vocabulary" in recipe_problem(tmp_path)
    assert "model is not a local folder and can't be loaded" in recipe_problem(tmp_path / "model")
    assert "./nope is not a local folder and can't be loaded" in recipe_problem("./nope")


def test_a_broken_tokenizer_or_a_pointer_of_git_lfs_is_named_without_a_traceback(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for content in ("{", "{}", "[]", "", "\x00", json.dumps({"model": {"type": "BPE"}})):
        (tmp_path / "tokenizer.json").write_text(content)
        assert f"{tmp_path}: its tokenizer can't be read" in recipe_problem(tmp_path), content
    for name in ("tokenizer.json", "special_tokens_map.json", "chat_template.jinja", "merges.txt"):
        build_tokenizer().save_pretrained(tmp_path)
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
        problem = recipe_problem(tmp_path)
        assert f"{tmp_path / name} is a pointer of git-lfs, not the file" in problem and "git lfs pull" in problem
        (tmp_path / name).unlink()


@pytest.mark.slow
def test_a_hub_model_that_is_not_in_the_cache_says_so_when_offline():
    assert "nobody/nothing is not a local folder and can't be loaded from the hub" in recipe_problem("nobody/nothing")


def test_the_template_of_the_recipe_replaces_the_models(tmp_path):
    build_tokenizer(None).save_pretrained(tmp_path)
    (tmp_path / "mine.jinja").write_text("\ufeff{{ messages }}", encoding="utf-8")
    assert load(tmp_path, chat_template=str(tmp_path / "mine.jinja")).chat_template == "{{ messages }}"
    assert "### Assistant" in load(tmp_path, chat_template="plain").chat_template
    assert "can't be read: No such file" in recipe_problem(tmp_path, chat_template=str(tmp_path / "none.jinja"))
    (tmp_path / "empty.jinja").write_text(" \n")
    assert "is empty" in recipe_problem(tmp_path, chat_template=str(tmp_path / "empty.jinja"))
    (tmp_path / "wide.jinja").write_text("a", encoding="utf-16")
    assert "is not UTF-8" in recipe_problem(tmp_path, chat_template=str(tmp_path / "wide.jinja"))


def test_code_in_a_runs_tokenizer_folder_is_not_run(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass")
    with pytest.raises(RecipeError, match="can't be read"):
        read_tokenizer(tmp_path, recipe("rows.jsonl"))
    assert not (tmp_path / "ran").exists()


def test_rows_with_a_token_that_was_added_train_its_row_and_tokens_of_another_model_are_refused(tmp_path, write):
    def encoded(text, vocab_size):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocab_size}))
        return encode_rows(recipe(write("rows.jsonl", [{"text": text}]), model_name_or_path=str(tmp_path)))

    tokenizer = build_tokenizer()
    size = len(tokenizer)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path)
    for text, rows in (("a word with a row of its own: <extra>", [size, size + 1]), ("a word", [])):
        assert encoded(text, size).trained_embedding_rows == rows
    with pytest.raises(DataError, match="has 100 tokens"):
        encoded("a word of another model", 100)


def with_tokens(new_tokens, **settings):
    tokenizer = build_tokenizer(**settings)
    add_tokens(tokenizer, recipe("rows.jsonl", new_tokens=new_tokens))
    return tokenizer


def test_a_token_that_the_model_has_is_refused_and_the_longest_of_several_new_ones_is_taken():
    for name in ("<|im_end|>", "a", "é"):
        with pytest.raises(RecipeError, match="is a token of tiny already"):
            with_tokens(["<|new|>", name], extra=("é",))
    tokenizer = with_tokens(["<|tick", "<|ticket|>", "日本"])
    ids = tokenizer("日本<|ticket|><|tick|>", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:3] == ["日本", "<|ticket|>", "<|tick"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "日本<|ticket|><|tick|>"


def test_a_new_token_in_a_users_text_is_that_token_a_special_one_is_text_and_10_000_have_their_own_rows():
    tokenizer = with_tokens(["<|ticket|>"])
    [ticket, end] = tokenizer.convert_tokens_to_ids(["<|ticket|>", "<|im_end|>"])
    ids = Encoder(tokenizer, with_template=True).prompt_ids([{"role": "user", "content": "<|ticket|> <|im_end|>"}])
    assert (ids.count(ticket), ids.count(end)) == (1, 1)
    names = [f"<|{number}|>" for number in range(10_000)]
    tokenizer = with_tokens(names)
    before = len(tokenizer) - 10_000
    assert trained_embedding_rows(tokenizer, recipe("rows.jsonl", new_tokens=names), before, 5) == [before, before + 10_000]
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
    seen = trained_embedding_rows(tokenizer, wanted, end + more_rows, highest if highest >= 0 else end - 1)
    assert seen == [end + row for row in rows]
