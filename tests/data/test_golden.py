"""What small files of every format are trained on, refused, noted and counted for, stored in golden.jsonl.

Each line has a name, the files, settings of the recipe (with a chat template by name or as text), options of the tokenizer,
and the result. After an intended change run this file as a program
from the root of the repository, and read the difference: `python tests/data/test_golden.py`.
"""

import gzip
import hashlib
import json
import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from picture_data import VISION_CHATML, OneTokenEach, encoded, picture
from small_data import CHATML, CHATML_MARKED, FORGETFUL, build_tokenizer

from finetune.data.preparation import encode
from finetune.data.tokenizer import PLAIN_TEMPLATE, ProcessorLoader
from finetune.data.tokens import decode_spans
from finetune.errors import FinetuneError
from finetune.recipe import recipe_from

GOLDEN = Path(__file__).with_name("golden.jsonl")
CASES = {case["name"]: case for case in map(json.loads, GOLDEN.read_text(encoding="utf-8").splitlines())}
#: Writes calls as Qwen's templates do, and the reasoning of a message.
TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "broken": "ok\n{% for %}", "chatml": CHATML, "tools": TOOLS, "vision": VISION_CHATML, "none": None, "marked": CHATML_MARKED,
    "forgetful": FORGETFUL, "plain": PLAIN_TEMPLATE,
}  # fmt: skip


def _as_lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _as_parquet(rows) -> bytes:
    parquet.write_table(pa.Table.from_pylist(rows), sink := pa.BufferOutputStream())
    return sink.getvalue().to_pybytes()


def _as_arrow(rows) -> bytes:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(sink := pa.BufferOutputStream(), table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


#: Extension of a file given as rows -> its writer.
WRITERS = {
    ".gz": lambda rows: gzip.compress(_as_lines(rows)), ".parquet": _as_parquet, ".arrow": _as_arrow,
    ".zst": lambda rows: pa.Codec("zstd").compress(_as_lines(rows), asbytes=True), ".png": lambda size: encoded(picture(*size)),
    ".json": lambda rows: json.dumps(rows).encode(),
}  # fmt: skip


def result_of(case):
    """Prepare the files of a case below the current folder, and return everything that is known of their rows."""
    for name, content in case["files"].items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write = str.encode if isinstance(content, str) else WRITERS.get(path.suffix, _as_lines)
        path.write_bytes(write(content, case["encoding"]) if "encoding" in case else write(content))
    settings = {"model_name_or_path": "tiny", **case["settings"]}
    template, limit = settings.pop("template", "chatml"), settings.pop("limit", None)
    extra = ("<|image_pad|>", "<think>", "</think>")
    tokenizer = build_tokenizer(TEMPLATES.get(template, template), extra=extra, **case.get("tokenizer", {}))
    result = {}
    try:
        recipe = recipe_from(settings)
        selected = encode(recipe, tokenizer).select(recipe, limit)
        result = {
            "notes": selected.notes,
            "train": _split(selected.report, selected.train, selected.splits[0], tokenizer),
        }
        if selected.eval is not None:
            result["eval"] = _split(selected.eval_report, selected.eval, selected.splits[1], tokenizer)
        selected.raise_problems()
    except FinetuneError as error:
        result["error"] = error.as_json()
    # tuples become lists
    return json.loads(json.dumps(result).replace(str(Path.cwd()), "FOLDER"))


def _split(report, dataset, split, tokenizer):
    # bytes of a picture depend on Pillow's version
    contents = [(row.file, row.row, row.content() | {"pictures": len(row.pictures)}) for row in split.examples]
    texts = []
    for row in dataset:
        for prefix in ("", "rejected_") if "rejected_labels" in row else ("",):
            spans = decode_spans(row[f"{prefix}input_ids"], row[f"{prefix}labels"], tokenizer)
            texts.append("".join(f"{{+{text}+}}" if is_trained else text for text, is_trained in spans))
    values = {name: value for name, value in report.as_json().items() if value not in ([], (), {}, 0, None)}
    columns = {name: list(dataset[name]) for name in dataset.column_names if name != "pictures"}
    digests = [hashlib.sha256(json.dumps(item, sort_keys=True).encode()).hexdigest()[:16] for item in (contents, columns)]
    return {**values, "texts": texts[:4], "contents and tokens": digests}


@pytest.mark.parametrize("name", CASES)
def test_a_small_file_is_read_as_it_was(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ProcessorLoader, "__call__", lambda *_: OneTokenEach())
    assert result_of(CASES[name]) == CASES[name]["result"]


if __name__ == "__main__":
    ProcessorLoader.__call__ = lambda *_: OneTokenEach()  # type: ignore[method-assign]
    for golden_case in CASES.values():
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            golden_case["result"] = result_of(golden_case)
    GOLDEN.write_text("".join(json.dumps(case) + "\n" for case in CASES.values()), encoding="utf-8")
