"""Export a run as a GGUF file for llama.cpp and Ollama."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.data.tokenizer import read_tokenizer
from finetune.errors import CommandError, is_disk_full
from finetune.evaluate.answerer import adapter_folder, answer_limit, answerer_loader, chat_format_of
from finetune.evaluate.results import answers_without_thoughts
from finetune.evaluate.rows import file_rows, held_out_rows, run_encoder
from finetune.export import GGUF_TYPES, parity
from finetune.export.llama_converter import NEW_TOKENS
from finetune.export.merge import atomic_folder, merge, model_folder, require_disk
from finetune.export.ollama import TemplateUnsupported, modelfile, role_form
from finetune.files import read_object, read_safetensors_header, write_json
from finetune.model.weights import ADAPTER_WEIGHTS
from finetune.planner.plan import read_plan
from finetune.run.directory import RunDirectory
from finetune.system import link_or_copy
from finetune.units import Progress

_GENERATION_TAG = re.compile(r"\{%(?P<before>[-+]?)\s*(?P<end>end)?generation\s*(?P<after>[-+]?)%\}")


@dataclass(frozen=True)
class Exported:
    """An exported GGUF file."""

    folder: Path
    file: Path
    adapter: Path | None  # file of the adapter, if it was exported separately
    modelfile: Path | None
    why_no_modelfile: str | None
    check: parity.ParityReport


def export_gguf(
    run: RunDirectory, target: Path | None = None, *, gguf_type: str = "f16", separate: bool = False, llama_cpp: Path,
    rows: int = 120, data: str | None = None, progress: Progress = lambda _: None,
) -> Exported:  # fmt: skip
    """Write a GGUF model (`separate`: base and adapter in two files), and a Modelfile if Ollama can express its template.

    Compares `rows` held-out rows, or rows of `data`. Raise ParityError, CommandError, DataError or DiskFull.
    """
    settings = read_plan(run.plan).settings
    if settings.vision:
        raise CommandError(
            f"{run.path} was trained with images; llama.cpp needs a second file (mmproj) for them, which export does not write",
            f"Merge it (finetune merge {run.path}) and convert that folder with llama.cpp's {parity.CONVERTER}, once for the "
            "model and once for its images (mmproj); answers are then not compared with the adapter's.",
        )
    target = target or run.path / f"gguf-{'adapter-' if separate else ''}{gguf_type}"
    if not run.adapter.is_dir():
        raise CommandError(f"{run.path} has no adapter yet", f"Finish it: finetune resume {run.path}")
    if separate and (unsupported := _unsupported_in_adapter_file(run)):
        raise CommandError(f"a GGUF adapter can't hold this run's {unsupported}", "Export the merged model: leave out --to.")
    # the folder is renamed to `target` after llama.cpp has answered like the adapter
    with atomic_folder(target) as temporary:
        expected = _Expected(run, data, rows, progress)
        temporary.mkdir(parents=True)
        name = run.path.resolve().name
        adapter = temporary / f"{name}-adapter.gguf" if separate else None
        file = temporary / (f"base-{gguf_type}.gguf" if separate else f"{name}-{gguf_type}.gguf")
        _convert(run, file, adapter, gguf_type, llama_cpp, progress)
        report, why_no_modelfile = _check_parity(file, adapter, expected, gguf_type, progress)
    adapter = target / adapter.name if adapter else None
    modelfile_path = None if why_no_modelfile else target / "Modelfile"
    return Exported(target, target / file.name, adapter, modelfile_path, why_no_modelfile, report)


def _unsupported_in_adapter_file(run: RunDirectory) -> str:
    if read_plan(run.plan).settings.trained_embedding_rows:
        return "new tokens"
    with (run.adapter / ADAPTER_WEIGHTS).open("rb") as file:
        names = read_safetensors_header(file)[0]
    # llama.cpp's converter fails: https://github.com/ggml-org/llama.cpp/issues/21125
    return "out_proj of gated delta nets" if any(".linear_attn.out_proj." in name for name in names) else ""


class _Expected:
    # the adapter's prompts, greedy answers and stop tokens

    def __init__(self, run: RunDirectory, data: str | None, limit: int, progress: Progress) -> None:
        from finetune.evaluate.score import score_models

        self.encoder = run_encoder(run)
        self.tokenizer = self.encoder.tokenizer
        self.without_thoughts = answers_without_thoughts(run)
        self.has_template = chat_format_of(run, self.encoder) is not None
        self.stops = set(self.encoder.stops)
        eval_rows = file_rows(data, run, self.tokenizer, limit) if data else held_out_rows(run, limit)
        self.rows = replace(eval_rows, ids=[], labels=[])  # without these, `scores` measures no losses
        if not self.rows.prompt_ids:
            raise CommandError(f"{data or run.path} has no rows with prompts", "Give some: --data FILE")
        self.max_new_tokens = answer_limit(self.tokenizer, self.rows.references, self.rows.answer_tokens)
        self.context_tokens = max(map(len, self.rows.prompt_ids)) + self.max_new_tokens + 1
        models = [("tuned", adapter_folder(run))]
        [score] = score_models(run, answerer_loader(run), self.rows, models, "exact", self.max_new_tokens, progress)
        self.answers = score.answers


def _convert(run: RunDirectory, file: Path, adapter: Path | None, gguf_type: str, llama_cpp: Path, progress: Progress) -> None:
    checkpoint = file.parent / "merged"
    if adapter:
        settings = read_plan(run.plan).settings
        checkpoint.mkdir()
        for path in model_folder(settings).iterdir():
            if path.suffix == ".safetensors":
                link_or_copy(path.resolve(), checkpoint / path.name)
            elif path.name in ("config.json", "generation_config.json") or path.name.endswith(".index.json"):
                shutil.copyfile(path, checkpoint / path.name)
        read_tokenizer(run.adapter, settings).save_pretrained(str(checkpoint))
    else:
        merge(run, checkpoint, progress=progress)
        write_json(checkpoint / NEW_TOKENS, list(read_plan(run.plan).settings.new_tokens))
    weight_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    require_disk(weight_bytes, file, "the GGUF file")
    template = checkpoint / "chat_template.jinja"
    if template.is_file():
        template.write_text(without_generation_tags(template.read_text(encoding="utf-8")), encoding="utf-8")
    progress("converting with llama.cpp")
    f16_file = file if gguf_type == "f16" else file.with_name("f16.gguf")
    _run_converter(llama_cpp, pre_tokenizer(checkpoint), parity.CONVERTER, f16_file, str(checkpoint))
    if adapter:
        _run_converter(llama_cpp, "-", "convert_lora_to_gguf.py", adapter, "--base", str(checkpoint), str(run.adapter))
    shutil.rmtree(checkpoint)
    if gguf_type != "f16":
        progress(f"quantising to {gguf_type}")
        _quantise(f16_file, file, gguf_type)
        f16_file.unlink()


def _run_converter(llama_cpp: Path, pre_tokenizer_name: str, script: str, output: Path, *arguments: str) -> None:
    command = [sys.executable, "-P", "-m", "finetune.export.llama_converter", str(llama_cpp), pre_tokenizer_name, script]
    command += [*arguments, "--outfile", str(output), "--outtype", "f16"]
    # the converter exits when its stdin closes, even if this process is killed
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        stderr = process.stderr.read()  # type: ignore[union-attr]
    if process.returncode or not output.is_file():
        raise _converter_error(stderr.decode("utf-8", "replace"))


def _converter_error(stderr: str) -> Exception:
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    message = (errors or lines or [""])[-1]
    if is_disk_full(OSError(stderr)) or re.search(r"\d+ requested and \d+ written", message):  # numpy's message
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "pre-tokenizer was not recognized" in message:
        return parity.ParityError("tokens", "llama.cpp does not know this tokenizer")
    return CommandError(f"llama.cpp's converter failed: {message[:300]}", "A newer checkout of llama.cpp may know this model.")


def _quantise(source: Path, target: Path, gguf_type: str) -> None:
    import llama_cpp

    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # else it prints a line per tensor
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = GGUF_TYPES[gguf_type].file_type
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters)) != 0:
        raise CommandError(f"llama.cpp could not quantise the model to {gguf_type}", "Try --type f16.")


def pre_tokenizer(folder: Path) -> str:
    """Return llama.cpp's name of a byte-level pre-tokenizer; `-` for others."""
    # for tokenizers that llama.cpp does not recognise; `check_tokens` verifies the name
    definition = (read_object(folder / "tokenizer.json") or {}).get("pre_tokenizer") or {}
    match definition.get("pretokenizers", [definition]):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return "gpt-2"
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ]:
            return "smollm"
    return "-"


def without_generation_tags(template: str) -> str:
    """Replace transformers' `generation` tags by conditions that other programs know."""
    return _GENERATION_TAG.sub(
        lambda tag: f"{{%{tag['before']} {'endif' if tag['end'] else 'if true'} {tag['after']}%}}", template
    )


def _check_parity(
    file: Path, adapter: Path | None, expected: _Expected, gguf_type: str, progress: Progress
) -> tuple[parity.ParityReport, str | None]:  # fmt: skip
    tokenizer, prompt_ids = expected.tokenizer, expected.rows.prompt_ids
    with parity.LlamaCpp(file, expected.context_tokens, adapter) as model:
        progress("comparing tokens")
        prompt_count = parity.check_tokens(model, tokenizer, prompt_ids, expected.stops)
        progress("comparing templates")
        conversation_count = 0
        if expected.has_template:
            conversation_count = parity.check_template(model, expected.encoder, expected.rows.prompts)
        if not prompt_count + conversation_count:
            raise parity.ParityError("tokens", "no prompt decodes to text with the same tokens, so tokens can't be compared")
        equal_answers = parity.check_answers(
            model, tokenizer, prompt_ids, expected.answers, expected.stops, expected.max_new_tokens, gguf_type, progress
        )
        why_no_modelfile = _write_modelfile(file, adapter, model, expected)
    return parity.ParityReport(prompt_count, conversation_count, len(expected.answers), equal_answers), why_no_modelfile


def _write_modelfile(file: Path, adapter: Path | None, model: parity.LlamaCpp, expected: _Expected) -> str | None:
    if not expected.has_template:
        return "trained on prompts without a chat template"
    template = expected.encoder.template
    assert template is not None
    bos = expected.tokenizer.bos_token if model.adds_bos and expected.tokenizer.bos_token else ""
    try:
        form = role_form(
            lambda messages, prompt: template.render(messages, add_generation_prompt=prompt),
            bos=bos, writes_today=template.writes_today,
        )  # fmt: skip
    except TemplateUnsupported as error:
        return f"this chat template can't be written for Ollama: {error}"
    for prompt in expected.rows.prompts:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        if model.tokenise(form.text(messages), bos=model.adds_bos) != expected.encoder.prompt_ids(messages):
            return "this chat template can't be written for Ollama: llama.cpp tokenises its text differently"
    if expected.without_thoughts:  # prompts end as in training
        form = replace(form, generation_prompt=form.generation_prompt + template.format.before_answer)
    stops = [str(expected.tokenizer.decode([stop])) for stop in sorted(expected.stops)]
    text = modelfile(file.name, form, stops, adapter.name if adapter else None)
    (file.parent / "Modelfile").write_text(text, encoding="utf-8")
    return None
