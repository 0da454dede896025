"""The parts of an export to GGUF that need no llama.cpp: the template in Ollama's language, and early refusals."""

import errno
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from finetune.bundled import model_path
from finetune.data.template import Template
from finetune.data.tokenizer import PLAIN_TEMPLATE
from finetune.errors import CommandError
from finetune.export import gguf
from finetune.export.llama_converter import NEW_TOKENS
from finetune.export.ollama import TemplateUnsupported, conversations, modelfile, role_form
from finetune.export.parity import ParityError
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

    def load(text=None):
        tokenizer.chat_template = text or tokenizer.chat_template
        return Template(tokenizer)

    return load


#: The same in Ollama's language: with a text where no system message is first, and without system messages.
IN_GO = {
    CHATML: (
        '{{ if ne (index .Messages 0).Role "system" }}<|im_start|>system\nYou are helpful.<|im_end|>\n{{ end }}'
        '{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n{{ end }}{{ end }}'
        "<|im_start|>assistant\n"
    ),
    GEMMA: (
        '{{ range .Messages }}{{ if eq .Role "user" }}<start_of_turn>user\n{{ .Content }}<end_of_turn>\n'
        '{{ else if eq .Role "assistant" }}<start_of_turn>model\n{{ .Content }}<end_of_turn>\n{{ end }}{{ end }}'
        "<start_of_turn>model\n"
    ),
}


@pytest.mark.parametrize(("text", "bos"), [(None, ""), (CHATML, ""), (GEMMA, "<bos>"), (PLAIN_TEMPLATE, "")])
def test_a_template_that_writes_message_by_message_is_the_same_in_ollamas_language(template, text, bos):
    source = template(text)
    form = role_form(lambda messages, prompt: source.render(messages, add_generation_prompt=prompt), bos=bos)
    for messages in conversations("system" in form.around):
        expected = source.render(messages, add_generation_prompt=True).removeprefix(bos)
        assert form.text(messages) == expected
    assert text not in IN_GO or form.as_go() == IN_GO[text]
    file = modelfile("a.gguf", form, ["<|end|>"])
    assert file.startswith("FROM ./a.gguf\nTEMPLATE") and file.endswith('\nPARAMETER stop "<|end|>"\n')


@pytest.mark.parametrize("text", [MISTRAL, UPPER, COUNTED, "{{ messages[-1]['content'] }}"])
def test_another_template_is_refused_with_the_reason(template, text):
    source = template(text)
    with pytest.raises(TemplateUnsupported, match="it (writes|leaves)"):
        role_form(lambda messages, prompt: source.render(messages, add_generation_prompt=prompt))


def test_todays_date_or_a_missing_bos_is_refused_and_without_generation_tags_the_text_is_the_same(template):
    source = template()
    with pytest.raises(TemplateUnsupported, match="date"):
        role_form(lambda messages, prompt: source.render(messages, add_generation_prompt=prompt), writes_today=True)
    with pytest.raises(TemplateUnsupported, match="does not begin"):
        role_form(lambda messages, prompt: source.render(messages, add_generation_prompt=prompt), bos="<s>")
    original = template()
    portable = template(gguf.without_generation_tags(original.source))
    assert "generation" in original.source and "generation %}" not in portable.source.replace("generation_prompt", "")
    for messages in conversations(True):
        assert original.render(messages, add_generation_prompt=True) == portable.render(messages, add_generation_prompt=True)


def test_the_tokenizers_first_steps_have_llama_cpps_name_and_the_converters_output_becomes_the_right_error():
    assert gguf.pre_tokenizer(model_path("tiny")) == "smollm"
    assert gguf.pre_tokenizer(model_path("tiny").parent) == "-"
    full = gguf._converter_error("Traceback\nOSError: [Errno 28] No space left on device\n")
    short = gguf._converter_error(
        "WARNING: The BPE pre-tokenizer was not recognized!\nOSError: 36864 requested and 0 written\n"
    )
    assert full.errno == short.errno == errno.ENOSPC
    unknown = gguf._converter_error("NotImplementedError: BPE pre-tokenizer was not recognized - update get_vocab_base_pre()")
    assert unknown.stage == "tokens"
    assert "KeyError: 'x'" in str(gguf._converter_error("INFO: Loading\nTraceback\nKeyError: 'x'\n"))
    assert ParityError("template", "why").as_json()["stage"] == "template"


def test_without_the_package_or_with_an_adapter_that_llama_cpp_can_not_convert_nothing_is_started(
    home, kept_run, monkeypatch, finetune
):
    run = RunDirectory(kept_run(home))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    code, shown = finetune("export", run.path)
    assert code == 2 and "llama-cpp-python" in shown and "convert_hf_to_gguf" in shown
    assert not list(run.path.glob("*gguf*"))
    tensor = "base_model.model.model.layers.0.linear_attn.out_proj.lora_B.weight"
    save_file({tensor: torch.zeros(2, 2)}, run.adapter / "adapter_model.safetensors")
    with pytest.raises(CommandError, match="can't hold this run's out_proj of gated delta nets") as error:
        gguf.export_gguf(run, llama_cpp=home, separate=True)
    assert "merged model" in error.value.fix and not list(run.path.glob("*gguf*"))


CONVERTER = """
class TextModel:
    dir_model = {folder!r}
    def get_vocab_base_pre(self, tokenizer): pass
    def does_token_look_special(self, token): return token.startswith("<|")
def main():
    print([TextModel().does_token_look_special(token) for token in ("<|ticket|>", "<|end|>", "word")])
"""


@pytest.mark.parametrize(("names", "control"), [(["<|ticket|>"], "[False, True, False]"), (None, "[True, True, False]")])
def test_new_tokens_are_no_control_tokens_whose_text_llama_cpp_hides(tmp_path, names, control):
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER.format(folder=str(tmp_path)))
    if names:
        (tmp_path / NEW_TOKENS).write_text(json.dumps(names))
    command = [sys.executable, "-m", "finetune.export.llama_converter", str(tmp_path), "-", "convert_hf_to_gguf.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.read().strip() == control
