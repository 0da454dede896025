"""A small byte-level tokenizer made on the spot, chat templates with and without generation markers, and rows."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from finetune.data.preparation import encode
from finetune.data.sources import sources_of
from finetune.data.token_cache import SourceReader
from finetune.recipe import recipe_from
from finetune.settings import DatasetRecipe

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: The same text, with the answers marked but not their end-of-turn token, as in many published templates.
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: Drops the thinking of all answers but the last, as Qwen3's does.
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "Where is my parcel? It was due on Monday and the box of tea has not come.",
    "### User: What is 2+2?\n### Assistant: It is 4, and 3+4 is 7.",
    '{"queue": "shipping", "priority": "high"} assistant user system tool think answer question',
]


def build_tokenizer(template: str | None = CHATML, *, extra: tuple[str, ...] = (), bos: bool = False, **special: str):
    """A byte-level BPE tokenizer. `bos` adds <s> in front of plain text, as Llama's does."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *extra]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = list(dict.fromkeys(names))
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 3, trainer)
    if bos:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    values = {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>", **special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **values)
    tokenizer.chat_template = template
    return tokenizer


def recipe(path, **settings):
    """A recipe for `path`; settings of the dataset are those the dataset has."""
    dataset = {"path": path, **{name: settings.pop(name) for name in DatasetRecipe.model_fields if name in settings}}
    return recipe_from({"model_name_or_path": "tiny", "dataset": dataset, **settings})


def read_examples(dataset):
    """`train` and `eval` (None without held-out files): the rows as they are read, before they are tokenised."""
    train, held_out = sources_of(dataset)
    return SimpleNamespace(train=_rows(train, dataset), eval=_rows(held_out, dataset) if held_out else None)


def _rows(sources, dataset):
    rows = SimpleNamespace(format="", rows_read=0, examples=[], refused=[])
    for source in sources:
        if rows.rows_read == dataset.max_rows:
            break
        reader = SourceReader(source, dataset, dataset.max_rows and dataset.max_rows - rows.rows_read)
        for parsed in reader.parsed():
            rows.examples += parsed.examples
            rows.refused += parsed.refused
            rows.rows_read += len(parsed.examples) + len(parsed.refused)
        rows.format = reader.parser.format
    return rows


def prepare(recipe, tokenizer, *, max_length, progress=lambda *_: None, report_only=False):
    """A recipe's rows, read, checked and tokenised; with `report_only` also those that can't be trained on."""
    selected = encode(recipe, tokenizer, progress=progress).select(recipe, max_length)
    if not report_only:
        selected.raise_problems()
    return selected


def talk(*turns: str, system: str | None = None) -> dict:
    """A row of messages: the user speaks first, then in turn."""
    system_messages = [{"role": "system", "content": system}] if system is not None else []
    return {
        "messages": system_messages
        + [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(turns)]
    }


def trained_text(encoded, tokenizer) -> str:
    """The text of the trained tokens of one sequence, spans separated by a bar."""
    from finetune.data.tokens import decode_spans

    return "|".join(text for text, flag in decode_spans(encoded.input_ids.tolist(), encoded.labels.tolist(), tokenizer) if flag)


def advised(fix: str) -> list[dict]:
    """The settings of the dataset that each line of an error's fix says to type."""
    from finetune.recipe.yaml import parse_value

    commands = [shlex.split(line) for line in fix.splitlines() if "dataset." in line]
    arguments = [[word[8:].partition("=") for word in line if word.startswith("dataset.") and "=" in word] for line in commands]
    return [{name: parse_value(text) for name, _, text in line} for line in arguments if line]
