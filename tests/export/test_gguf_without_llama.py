"""What of an export to GGUF needs no llama.cpp: the template in Ollama's language, and what is refused before any work."""

import errno
import re
import sys

import pytest

from finetune.bundled import model_path
from finetune.data.template import Template
from finetune.data.tokenizer import PLAIN_TEMPLATE
from finetune.errors import CommandError, PackagesError
from finetune.export import gguf
from finetune.export.ollama import NotProven, conversations, modelfile, role_form
from finetune.export.same import NotTheSame
from finetune.run.directory import RunDirectory

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for message in messages %}{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' }}"
    "{{ message['content'] + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' }}"
    "{% if loop.last and messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "{{ message['content'] + '[/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + '</s>' }}{% endif %}"
    "{% endfor %}"
)
UPPER = "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] | upper }}{% endfor %}"
COUNTED = "{% for message in messages %}{{ loop.index ~ '<' + message['role'] + '>' + message['content'] + '.' }}{% endfor %}"


@pytest.fixture
def template():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny"))

    def made(text=None):
        tokenizer.chat_template = text or tokenizer.chat_template
        return Template(tokenizer)

    return made


def written_by_go(text, messages):
    """The subset of Go's template language that a Modelfile has here, read word for word."""
    words = re.split(r"\{\{ (.*?) \}\}", text)

    def run(at, message, shown):
        out = ""
        while at < len(words):
            if at % 2 == 0:
                out += words[at] if shown else ""
                at += 1
                continue
            word, at = words[at], at + 1
            if word == "end" or word.startswith("else if"):
                return out, at - 1
            if word == ".Content":
                out += message["content"] if shown else ""
            elif word == "range .Messages":
                for each in messages:
                    inside, end = run(at, each, shown)
                    out += inside
                at = end + 1
            else:
                taken = False
                while word != "end":
                    role = re.search(r'"(\w+)"', word)[1]
                    of = messages[0] if "index" in word else message
                    holds = shown and not taken and of is not None and ((of["role"] == role) != ("ne (" in word))
                    inside, end = run(at, message, holds)
                    out, taken, word, at = out + inside, taken or holds, words[end], end + 1
        return out, at

    return run(0, None, True)[0]


@pytest.mark.parametrize(("text", "bos"), [(None, ""), (CHATML, ""), (GEMMA, "<bos>"), (PLAIN_TEMPLATE, "")])
def test_a_template_that_writes_message_by_message_is_the_same_in_ollamas_language(template, text, bos):
    made = template(text)
    form = role_form(lambda messages, prompt: made.render(messages, prompt=prompt), bos=bos)
    for messages in conversations("system" in form.around):
        expected = made.render(messages, prompt=True).removeprefix(bos)
        assert form.text(messages) == written_by_go(form.as_go(), messages) == expected
    file = modelfile("a.gguf", form, ["<|end|>"])
    assert file.startswith("FROM ./a.gguf\nTEMPLATE") and file.endswith('\nPARAMETER stop "<|end|>"\n')


@pytest.mark.parametrize("text", [MISTRAL, UPPER, COUNTED, "{{ messages[-1]['content'] }}"])
def test_another_template_is_refused_with_the_reason(template, text):
    made = template(text)
    with pytest.raises(NotProven, match="it (writes|leaves)"):
        role_form(lambda messages, prompt: made.render(messages, prompt=prompt))


def test_a_template_with_todays_date_or_without_its_bos_is_refused(template):
    made = template()
    with pytest.raises(NotProven, match="date"):
        role_form(lambda messages, prompt: made.render(messages, prompt=prompt), writes_today=True)
    with pytest.raises(NotProven, match="does not begin"):
        role_form(lambda messages, prompt: made.render(messages, prompt=prompt), bos="<s>")


def test_a_template_without_marks_of_answers_writes_the_same_text(template):
    made = template()
    other = template(gguf.portable(made.source))
    assert "generation" in made.source and "generation %}" not in other.source.replace("generation_prompt", "")
    for messages in conversations(True):
        assert made.render(messages, prompt=True) == other.render(messages, prompt=True)


def test_the_bundled_tokenizers_first_steps_have_llama_cpps_name():
    assert gguf.pre_tokenizer(model_path("tiny")) == "smollm"
    assert gguf.pre_tokenizer(model_path("tiny").parent) == "-"


def test_what_the_converter_says_becomes_the_error_that_it_is():
    full = gguf._why("Traceback\nOSError: [Errno 28] No space left on device\n")
    numpys = gguf._why("WARNING: The BPE pre-tokenizer was not recognized!\nOSError: 36864 requested and 0 written\n")
    assert full.errno == numpys.errno == errno.ENOSPC
    assert (
        gguf._why("NotImplementedError: BPE pre-tokenizer was not recognized - update get_vocab_base_pre()").stage == "tokens"
    )
    assert "KeyError: 'x'" in str(gguf._why("INFO: Loading\nTraceback\nKeyError: 'x'\n"))
    assert NotTheSame("template", "why").as_json()["stage"] == "template"


def test_without_the_package_or_the_converter_nothing_is_begun(home, kept_run, monkeypatch):
    run = RunDirectory(kept_run(home))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(PackagesError, match="llama-cpp-python"):
        gguf.export_gguf(run, llama_cpp=home)
    with pytest.raises(CommandError, match="convert_hf_to_gguf"):
        gguf.require_converter(home)
    assert not list(run.path.glob("*gguf*"))
