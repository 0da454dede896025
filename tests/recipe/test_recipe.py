"""A recipe says what the user means, and nothing else gets through."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.errors import RecipeError
from finetune.recipe import load_recipe, parse_recipe, recipe_from, shipped_recipes, write_recipe
from finetune.settings import AUTO, unresolved

SHORT = "model_name_or_path: some/model\ndataset: {path: rows.jsonl}\n"


def problems_of(text, *overrides):
    with pytest.raises(RecipeError) as error:
        parse_recipe(text, "r.yaml", overrides)
    return error.value.problems


def test_absent_settings_are_the_planners_numbers_mean_what_they_say_and_text_like_a_number_is_text():
    assert "lora_r" in unresolved(parse_recipe(SHORT))
    assert parse_recipe(SHORT + "lora_r: auto\n").lora_r == AUTO
    recipe = parse_recipe(SHORT + "learning_rate: 1e-4\nnum_train_epochs: 3\nmax_steps: 10\n")
    assert (recipe.learning_rate, recipe.num_train_epochs, recipe.max_steps) == (1e-4, 3.0, 10)
    typed = ["gpu=4090", "output_dir=2024", "memory_budget=20"]
    recipe = parse_recipe("model_name_or_path: m\ndataset: d\n", overrides=typed)
    assert (recipe.gpu, recipe.output_dir, recipe.memory_budget) == ("4090", "2024", "20GiB")
    with pytest.raises(RecipeError, match="gpu is True"):
        parse_recipe("model_name_or_path: m\ndataset: d\n", overrides=["gpu=true"])


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [("cutoff_len", "max_length", 512), ("sequence_len", "max_length", 512), ("max_seq_length", "max_length", 512),
     ("lora_rank", "lora_r", 8), ("micro_batch_size", "per_device_train_batch_size", 4), ("lr", "learning_rate", 1e-4)],
)  # fmt: skip
def test_names_of_other_tools_are_accepted_and_written_in_ours(alias, name, value):
    recipe = parse_recipe(SHORT + f"{alias}: {value}\n")
    assert getattr(recipe, name) == value
    assert f"{name}:" in write_recipe(recipe)
    assert f"{alias}:" not in write_recipe(recipe).replace(name, "")


def test_all_problems_are_reported_at_once_with_their_lines():
    problems = problems_of("base_model: x\ndataset: d.jsonl\nlora_r: true\npackin: true\nload_in_4bit: no\nnum_epochs: .inf\n")
    assert {problem.split(": ")[0] for problem in problems} == {"r.yaml:3", "r.yaml:4", "r.yaml:5", "r.yaml:6"}
    assert any("did you mean 'packing'" in problem for problem in problems)
    for value in ('"\\ud800"', '"a\\0b"', '"\\udfff x"'):  # lone surrogates, zero bytes
        assert "r.yaml:2" in str(problems_of(f"model_name_or_path: tiny\nmemory_budget: {value}\n")), value


@pytest.mark.parametrize(
    ("line", "message"),
    [("lora_r: 8\nlora_r: 16", "set twice (first on line 3)"), ("load_in_4bit: no", "write true or false"),
     ("lora_r: 010", "it should be"), ("lora_r: 12:30", "it should be"), ("learning_rate: .inf", "a valid number"),
     ("lora_dropout: true", "not true or false"),
     ("lora_r: '8'", "it should be"), ("lora_r: 8.5", "it should be"), ("a: &x [1]\nb: *x", "aliases"),
     ("lora_r: " + "[" * 1500, "nested too deep"), ("x: !!python/object:os.system {}", "unknown setting"),
     ("seed: !!int three", "not valid YAML"), ("learning_rate: 1e999", "a finite number"),
     ("output_dir: !!binary aGk=", "tags"), ("hf_token: abc", "secrets"),
     ("model_revision: hf_abcdefghijklmnopqrstuvwxyz", "secrets"), ("lora_r:\n\t- 1", "not valid YAML"),
     ("trust_remote_code: true", "pin it"), ("load_in_4bit: true\nload_in_8bit: true", "keep one"),
     ("effective_batch_size: 16\nper_device_train_batch_size: 3", "can't be divided"),
     ("cutoff_len: 5\nmax_length: 6", "both set"), ("memory_budget: lots", "not a size"),
     ("dataset.path: x", "unknown setting")],
)  # fmt: skip
def test_yaml_traps_are_closed(line, message):
    assert any(message in problem for problem in problems_of(SHORT + line + "\n")), problems_of(SHORT + line + "\n")


def test_overrides_replace_any_key_also_under_its_alias():
    recipe = parse_recipe(
        SHORT + "cutoff_len: 512\n", "r", ["max_length=1024", "dataset.on_bad_rows=skip", "target_modules=[q, v]"]
    )
    assert (recipe.max_length, recipe.dataset.on_bad_rows, recipe.target_modules) == (1024, "skip", ["q", "v"])


def test_a_mistyped_override_is_refused_and_a_secret_in_its_name_is_not_repeated():
    for override in ("lora_r", "=3", "lora_r=", "model_name_or_path.x=1", "lorar=3", "dataset.pth=x"):
        assert problems_of(SHORT, override)
    for override in ("{}=1", "dataset.{}=1", "seed.{}=1", "{}"):
        assert "abcdefgh" not in str(problems_of(SHORT, override.format("hf_abcdefghijklmnopqrstuvwxyz")))
    assert any("UTF-8" in problem for problem in problems_of(SHORT, "output_dir=\udcff"))


@pytest.mark.parametrize("key", ["dataset.name", "dataset.token", "lora_target", "dataset.path", "seed"])
@pytest.mark.parametrize("secret", ["hf_" + "abcdefghij" * 3, "sk-proj-" + "Abc-d_1234" * 4])
def test_a_secret_at_any_depth_is_refused_and_not_repeated(key, secret):
    problems = problems_of(SHORT, f"{key}=[{secret}]" if key == "lora_target" else f"{key}={secret}")
    assert any("secrets don't belong" in problem for problem in problems)
    assert not any(secret[8:] in problem for problem in problems)


def test_a_file_that_is_no_recipe_is_refused_by_name_and_a_byte_order_mark_is_no_problem(tmp_path):
    path = tmp_path / "broken.yaml"
    for data in (b"", b"   \n", b"\xff\xfeb\x00", b"- 1\n- 2\n", b"just text", b"a: [", b"\x00", b"a: b: c"):
        path.write_bytes(data)
        with pytest.raises(RecipeError, match=r"broken\.yaml"):
            load_recipe(path)
    path.write_text("\ufeff" + SHORT.replace("\n", "\r\n"), encoding="utf-8")
    assert load_recipe(path).model_name_or_path == "some/model"


def test_data_in_the_place_of_a_recipe_is_called_data_with_the_command_and_a_picture_no_text(tmp_path):
    for name in ("my rows.jsonl", "rows.csv", "rows.jsonl.gz", "rows.parquet"):
        (tmp_path / name).write_bytes(b'{"text": "a"}\n{"text": "b"}\n')
        with pytest.raises(RecipeError, match="is data, not a recipe") as error:
            load_recipe(tmp_path / name)
        assert f"dataset.path={tmp_path / name}" in shlex.split(error.value.fix)
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0\x00\x10JFIF\x00")
    with pytest.raises(RecipeError, match="is not text; a recipe is a YAML file"):
        load_recipe(tmp_path / "photo.jpg")


def test_a_recipe_that_is_not_there_names_close_ones_and_every_shipped_one_is_written_back_the_same():
    with pytest.raises(RecipeError, match="tiny-cpu"):
        load_recipe("tiny-cp")
    assert "tiny-cpu" in shipped_recipes() and "7b-4090" in shipped_recipes()
    for path in shipped_recipes().values():
        recipe = load_recipe(path)
        assert parse_recipe(write_recipe(recipe)) == recipe


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20).filter(
    lambda t: t.strip()
)


@given(texts, texts, st.floats(1e-8, 0.5), st.integers(1, 10**6))
def test_what_is_written_is_read_back(model, path, rate, rank):
    try:
        recipe = recipe_from({"model_name_or_path": model, "dataset": {"path": path}, "learning_rate": rate, "lora_r": rank})
    except RecipeError:  # looks like a secret
        return
    assert parse_recipe(write_recipe(recipe)) == recipe


@given(st.text(max_size=200))
def test_no_text_makes_a_traceback(text):
    try:
        parse_recipe(text)
    except RecipeError as error:
        assert error.problems and error.exit_code == 2
