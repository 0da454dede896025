"""The bundled base models and datasets: the committed files equal the scripts' output, are small and load offline."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from finetune.bundled import dataset_paths, model_path
from finetune.recipe import load_recipe, recipe_from
from finetune.settings import resolve_plain
from make_base import TASKS, questions
from make_data import NEW_TOPICS, PREFERRED, PRIORITIES, PRODUCTS, QUEUES, TOPICS, bundled_texts, draw_messages, write
from make_vision import QUESTIONS, data_labels, draw_label, pixels, sorting, write_data

BUNDLED = model_path("tiny").parent
PATHS = dataset_paths("support")
PARCELS = dataset_paths("parcels")["train"].parent


def read(part: str) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in PATHS[part].read_text(encoding="utf-8").splitlines()]


@cache
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path("tiny"), local_files_only=True)


@cache
def model():
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        model_path("tiny"), local_files_only=True, use_safetensors=True, dtype=torch.float32
    )


def greedy_answer(question: str) -> str:
    messages = [{"role": "user", "content": question}]
    ids = tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer_ids = model().generate(**ids, max_new_tokens=80, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return tokenizer().decode(answer_ids, skip_special_tokens=True)


def test_the_data_script_reproduces_the_committed_files_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path)
    for dataset in ("support", "support-pairs"):
        for part, path in dataset_paths(dataset).items():
            assert (tmp_path / dataset / f"{part}.jsonl").read_bytes() == path.read_bytes()


def test_the_answers_of_a_pair_differ_in_the_queue_alone_and_each_queue_is_as_often_preferred_as_not() -> None:
    paths = dataset_paths("support-pairs").values()
    pairs = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    for pair in pairs:
        chosen, rejected = (json.loads(pair[name][0]["content"]) for name in ("chosen", "rejected"))
        assert chosen["queue"] != rejected["queue"] and chosen | {"queue": rejected["queue"]} == rejected
    assert len({pair["prompt"][0]["content"] for pair in pairs}) == 570
    preferred, others = (sorted(queues) for queues in zip(*PREFERRED.values(), strict=True))
    assert preferred == others and PREFERRED.keys() == NEW_TOPICS.keys() and not NEW_TOPICS.keys() & TOPICS.keys()


def test_enough_rows_with_no_message_twice_answer_with_json_from_closed_sets_which_training_covers():
    train, held_out = ([row[0]["content"] for row in read(part)] for part in ("train", "eval"))
    assert len(train) >= 600 and len(held_out) >= 100
    assert len({*train, *held_out}) == len(train) + len(held_out)
    for row in read("train") + read("eval"):
        assert [turn["role"] for turn in row] == ["user", "assistant"]
        answer = json.loads(row[1]["content"])
        assert "\n" not in row[1]["content"] and list(answer) == ["queue", "priority", "product"]
        assert answer["queue"] in QUEUES.values()
        assert answer["priority"] in PRIORITIES.values()
        assert answer["product"] in PRODUCTS.values()

    def values(part: str) -> set[tuple[str, str]]:
        return {item for row in read(part) for item in json.loads(row[1]["content"]).items()}

    assert values("eval") <= values("train")
    assert {value for key, value in values("eval") if key == "queue"} == set(QUEUES.values())


def test_pretraining_never_sees_a_bundled_message_the_routing_task_or_how_parcels_are_sorted():
    bundled = bundled_texts()
    messages = draw_messages(random.Random(0), 3000, excluded=set(bundled))
    assert not {message.text for message in messages} & bundled
    for message in messages[:200]:
        for answer in TASKS.values():
            assert not any(f'"{key}"' in answer(message) for key in ("queue", "priority", "product"))
    rng = random.Random(0)
    for label in (draw_label(rng) for _ in range(100)):
        keys = json.loads(sorting(label))
        assert not any(f'"{key}"' in answer(label) for answer in QUESTIONS.values() for key in keys)


def test_everything_bundled_is_within_eight_megabytes_and_holds_no_pickle() -> None:
    files = [path for path in BUNDLED.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    assert {path.suffix for path in files} <= {".py", ".json", ".jsonl", ".jinja", ".safetensors", ".png"}


def test_the_tokenizer_gives_back_any_text_digits_are_tokens_padding_is_no_stop_and_unknown_roles_are_refused():
    for text in ("My tent is torn.", "  two  spaces\n\ttab ", "Grüße, 東京 🙂", "12345.90 euros", '{"a": [1]}'):
        assert tokenizer().decode(tokenizer()(text)["input_ids"]) == text
    assert len(tokenizer()("90210")["input_ids"]) == 5
    assert None not in (tokenizer().pad_token_id, tokenizer().eos_token_id)
    assert tokenizer().pad_token_id != tokenizer().eos_token_id
    with pytest.raises(Exception, match="no role tool"):
        tokenizer().apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_a_conversation_renders_with_its_answers_marked_stop_token_included() -> None:
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Which article is it? My tent is torn."},
        {"role": "assistant", "content": "It is the tent."},
        {"role": "user", "content": "How urgent is this?"},
        {"role": "assistant", "content": "As usual."},
    ]
    row = tokenizer().apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert row["input_ids"][-1] == tokenizer().eos_token_id
    answers = [token for token, is_answer in zip(row["input_ids"], row["assistant_masks"], strict=True) if is_answer]
    assert tokenizer().decode(answers) == "It is the tent.<|end|>As usual.<|end|>"
    prompt = tokenizer().apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert tokenizer().apply_chat_template(messages, tokenize=False) == prompt + "As usual.<|end|>"


def test_the_model_loads_offline_stops_at_the_end_of_a_turn_and_can_not_route():
    assert 2_000_000 < model().num_parameters() < 2_500_000
    assert model().generation_config.eos_token_id == tokenizer().eos_token_id
    assert model().generation_config.pad_token_id == tokenizer().pad_token_id
    assert model().config.vocab_size == len(tokenizer())
    assert not any(greedy_answer(row[0]["content"]) == row[1]["content"] for row in read("eval")[:10])


@pytest.mark.slow
def test_the_base_answers_its_own_questions_on_held_out_messages() -> None:
    conversations = questions(random.Random(99), 26, excluded=bundled_texts())
    correct = sum(greedy_answer(question["content"]) == answer["content"] for question, answer in conversations)
    assert correct >= 23


def test_the_recipe_names_the_bundled_model_and_dataset_and_unknown_names_are_none():
    recipe = load_recipe("tiny-cpu")
    assert model_path(recipe.model_name_or_path).is_dir()
    assert dataset_paths(recipe.dataset.path)["train"].is_file()
    assert recipe.load_in_4bit is True and recipe.gpu == "cpu"
    assert model_path("no-such-model") is None and dataset_paths("no-such-data") is None


def test_the_script_makes_the_committed_300_small_pictures_and_their_rows_and_the_model_has_a_processor(tmp_path):
    write_data(tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (PARCELS / name).read_bytes()
    for number, label in enumerate(data_labels()):
        with Image.open(PARCELS / f"pictures/{number:03d}.png") as picture:
            assert np.array_equal(np.asarray(picture), pixels(label))
    files = sorted((PARCELS / "pictures").iterdir())
    assert len({path.read_bytes() for path in files}) == len(files) == 300
    assert sum(path.stat().st_size for path in files) < 2_000_000
    names = {path.name for path in model_path("tiny-vision").iterdir()}
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json"} <= names


@pytest.mark.slow
def test_in_4_bit_each_layer_of_the_model_answers_on_a_cpu() -> None:
    """Also those whose shapes bitsandbytes can't repack for a CPU with AVX512-BF16."""
    import torch
    from bitsandbytes.nn import Linear4bit

    from finetune.evaluate.answerer import load_model

    recipe = recipe_from({"model_name_or_path": "tiny-vision", "dataset": "parcels", "vision": True, "load_in_4bit": True})
    layers = [module for module in load_model(resolve_plain(recipe), None, "cpu").modules() if isinstance(module, Linear4bit)]
    with torch.no_grad():
        shapes = [layer(torch.ones(2, layer.in_features)).shape for layer in layers]
    assert shapes == [(2, layer.out_features) for layer in layers] and any(layer.in_features % 64 for layer in layers)
