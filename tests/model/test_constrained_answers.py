"""Answers under a JSON schema validate, whatever the model prefers: here it prefers random tokens."""

import json
import random
import re

import pytest
import torch

pytest.importorskip("llguidance", reason="no llguidance; pip install 'llguidance>=1.9,<2'")

from finetune.bundled import model_path  # noqa: E402
from finetune.errors import DataError  # noqa: E402
from finetune.model.constrained import Constraint  # noqa: E402

MAX_TOKENS = 3_000


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path("tiny"))


def random_schema(source, depth=0):
    """A schema of the parts that people use, whose answers can't be endless."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kinds += ["object", "array", "anyOf"] if depth < 3 else []
    kind = source.choice(["object", "object", "array"] if depth == 0 else kinds)
    if kind == "object":
        names = source.sample(["name", "größe", 'a "b"', "items", "x-1", "id", "", "when\n"], source.randint(0, 4))
        properties = {name: random_schema(source, depth + 1) for name in names}
        required = [name for name in names if source.random() < 0.6]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        fewest = source.randint(0, 2)
        return {"type": "array", "items": random_schema(source, depth + 1), "minItems": fewest, "maxItems": fewest + 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(source, depth + 1) for _ in range(source.randint(2, 3))]}
    if kind == "integer":
        smallest = source.randint(-50, 50)
        return {"type": "integer", "minimum": smallest, "maximum": smallest + source.randint(0, 100)}
    simple = {
        "string": {"type": "string", "maxLength": source.randint(1, 12)},
        "number": {"type": "number", "minimum": 0, "maximum": 9},
        "enum": {"enum": ["rot", 3, None, True, "a,b"][: source.randint(1, 5)]},
        "const": {"const": source.choice(["x", 7, False])},
        "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    }  # fmt: skip
    return simple.get(kind, {"type": kind})


def is_valid(value, schema):
    """Whether a value matches a schema of `random_schema`."""
    if "anyOf" in schema:
        return any(is_valid(value, part) for part in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return any(value == item and type(value) is type(item) for item in schema.get("enum", [schema.get("const")]))
    types = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
        "number": (int, float),
    }  # fmt: skip
    if not isinstance(value, types[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        return False
    if schema["type"] == "object":
        properties = schema["properties"]
        names_fit = value.keys() <= properties.keys() and set(schema["required"]) <= value.keys()
        return names_fit and all(is_valid(item, properties[name]) for name, item in value.items())
    if schema["type"] == "array":
        count_fits = schema["minItems"] <= len(value) <= schema["maxItems"]
        return count_fits and all(is_valid(item, schema["items"]) for item in value)
    if schema["type"] == "string":
        return len(value) <= schema.get("maxLength", 99) and re.fullmatch(schema.get("pattern", "(?s).*"), value) is not None
    if schema["type"] in ("boolean", "null"):
        return True
    return schema.get("minimum", value) <= value <= schema.get("maximum", value)


def random_answer(tokenizer, schema, generator):
    """The text of a model that prefers random tokens."""
    stop = tokenizer.convert_tokens_to_ids("<|end|>")
    constraint, ids = Constraint(tokenizer, schema, {stop}), torch.tensor([[5, 6]])
    for _ in range(MAX_TOKENS):
        scores = constraint(ids, torch.zeros(1, len(tokenizer) + 3))
        token = torch.multinomial(scores.softmax(-1), 1, generator=generator)
        if token.item() == stop:
            return tokenizer.decode(ids[0, 2:])
        ids = torch.cat([ids, token], dim=1)
    raise AssertionError(f"no end after {MAX_TOKENS} tokens: {schema}")


@pytest.mark.slow
def test_five_answers_to_each_of_two_hundred_random_schemas_validate(tokenizer):
    source, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(200):
        schema = random_schema(source)
        for _ in range(5):
            text = random_answer(tokenizer, schema, generator)
            assert is_valid(json.loads(text), schema), (schema, text)


def test_json_object_is_an_object(tokenizer):
    generator = torch.Generator().manual_seed(1)
    small = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}, "maxProperties": 3}
    assert isinstance(json.loads(random_answer(tokenizer, small, generator)), dict)


@pytest.mark.parametrize("schema", [{"type": "nothing"}, {"type": 3}, {"$ref": "#/nowhere"}, {"not": {"type": "string"}}])
def test_a_schema_that_can_not_be_used_is_refused_with_a_reason(tokenizer, schema):
    with pytest.raises(DataError, match="schema can't be used"):
        Constraint(tokenizer, schema, {1})
