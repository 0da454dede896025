"""A damaged file in a model's folder ends each command in a sentence, for 16-bit and for quantised models."""

import contextlib
import json
import shutil

import pytest

from finetune.bundled import model_path
from finetune.data.tokenizer import load_tokenizer
from finetune.errors import FinetuneError
from finetune.model.configuration import card_value
from finetune.model.transformers_config import load_config
from finetune.model.weights import check_weights, weights_fingerprint
from finetune.recipe import recipe_from

FILES = (
    "README.md", "config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "model.safetensors.index.json", "adapter_config.json", "model.safetensors",
)  # fmt: skip
DEEP = 100_000
#: What takes the place of a file's content; the values of all its keys are replaced by `all ...`.
DAMAGES = {
    "deep": b'{"a":' * DEEP + b"1" + b"}" * DEEP, "deep header": b"---\nbase_model: " + b"[" * DEEP + b"\n---\n",
    "deep template": b"{{" + b"(" * DEEP + b"}}", "recursive": b"---\na: &a [*a, *a]\nbase_model: *a\n---\n", "empty": b"",
    "binary": bytes(range(256)) * 40, "huge": b'{"a": "' + b"x" * 10_000_000 + b'"}', "list": b"[]", "no keys": b"{}",
    "long number": b'{"a": ' + b"9" * 5000 + b"}", "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
}  # fmt: skip
VALUES = {f"all {value}": value for value in (float("nan"), float("-inf"), -1, 10**30, 0.5, "x", [[1]], {"a": {}}, True, None)}


def damage(path, kind):
    keys = ["a"]
    with contextlib.suppress(OSError, ValueError):
        keys = json.loads(path.read_bytes())
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(DAMAGES[kind] if kind in DAMAGES else json.dumps(dict.fromkeys(keys, VALUES[kind])).encode())


@pytest.mark.parametrize("kind", ["deep", "binary", "pointer", "directory", "all x", "all [[1]]"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_read_or_refused(tmp_path, name, kind):
    folder = shutil.copytree(model_path("tiny"), tmp_path / "model")
    damage(folder / name, kind)
    recipe = recipe_from({"model_name_or_path": str(folder), "dataset": "rows.jsonl"})
    for check in (load_config, load_tokenizer, weights_fingerprint, lambda recipe: card_value(recipe, "license")):
        with contextlib.suppress(FinetuneError):
            check(recipe)
    with contextlib.suppress(FinetuneError):
        check_weights(folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["directory", *DAMAGES, *VALUES])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("model", ["16-bit", "nf4"])
def test_no_command_crashes(make_run, warm_starts, tmp_path, finetune, model, name, kind):
    folder = shutil.copytree(model_path("tiny"), tmp_path / "model")
    if model == "nf4":
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        stored = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=stored).save_pretrained(folder)
    settings = [f"model_name_or_path={folder}", f"load_in_4bit={json.dumps(model == 'nf4')}", "max_steps=1", "gpu=cpu"]
    run = make_run(*settings)
    damage(folder / name, kind)
    commands = [["plan", "tiny-cpu", *settings], ["run", "tiny-cpu", *settings, "dataset.max_rows=16"]]
    commands += [["resume", str(run.path)], ["eval", str(run.path), "--no-probe", "--rows", "2"], ["merge", str(run.path)]]
    commands += [["push", str(run.path), "a/b", "--dry-run", kind] for kind in ("--adapter", "--merged")]
    for command in commands:
        code, shown = finetune(*command)
        assert code != 1 and "Traceback" not in shown.err, (command, shown.out[-500:], shown.err[-500:])
