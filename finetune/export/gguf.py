"""Export a run as a GGUF file for llama.cpp and Ollama; it has its name when llama.cpp answers as the adapter does."""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from finetune.data.tokenizer import run_tokenizer
from finetune.errors import CommandError, DiskFull
from finetune.export.merge import folder_of, merge
from finetune.export.ollama import NotProven, modelfile, role_form
from finetune.export.same import LlamaCpp, NotTheSame, Same, check_answers, check_template, check_tokens, require_llama_cpp
from finetune.files import existing_parent, free_disk_bytes
from finetune.plan.plan import read_plan
from finetune.run.failures import is_disk_full
from finetune.system import link_or_copy, rename
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.evaluate.rows import EvalRows
    from finetune.run.directory import RunDirectory

Kind = Literal["f16", "q8_0", "q4_k_m"]
Progress = Callable[[str], None]
#: llama.cpp's numbers of the quantised types: LLAMA_FTYPE_MOSTLY_* in https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h
_FTYPES: dict[str, int] = {"q8_0": 7, "q4_k_m": 15}
CONVERTER = "convert_hf_to_gguf.py"
#: llama.cpp's names of pre-tokenizers, by the steps of the tokenizer that are the same; proven on the tokens afterwards.
_PRE = {("digits", "byte-level"): "smollm", ("byte-level",): "gpt-2"}
_GENERATION = re.compile(r"\{%(?P<before>[-+]?)\s*(?P<end>end)?generation\s*(?P<after>[-+]?)%\}")


@dataclass(frozen=True)
class Exported:
    """The folder with the GGUF file of the model (and of the adapter), a Modelfile or why not, and what was compared."""

    folder: Path
    file: Path
    adapter: Path | None
    modelfile: Path | None
    why_not: str | None
    same: Same

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        paths = {"folder": self.folder, "file": self.file, "adapter": self.adapter, "modelfile": self.modelfile}
        return {**{name: str(path) if path else None for name, path in paths.items()},
                "why_no_modelfile": self.why_not, "check": self.same.as_json()}  # fmt: skip


def export_gguf(
    run: RunDirectory, target: Path | None = None, *, kind: Kind = "f16", separate: bool = False, llama_cpp: Path,
    rows: int = 120, data: str | None = None, progress: Progress = lambda _: None,
) -> Exported:  # fmt: skip
    """Write RUN/gguf-KIND (or `target`): the merged model as GGUF, and a Modelfile when its template can be proven.

    `separate`: the base model and the adapter in two files, RUN/gguf-adapter-KIND.
    `llama_cpp`: a checkout of llama.cpp, whose converter is run. `rows`: how many held-out rows are answered, or of `data`.
    Raises NotTheSame with the first stage at which file and adapter part, DataError without rows, DiskFull without room.
    """
    require_llama_cpp()
    require_converter(llama_cpp)
    target = target or run.path / f"gguf-{'adapter-' if separate else ''}{kind}"
    if not run.adapter.is_dir():
        raise CommandError(f"{run.path} has no adapter yet", f"Finish it: finetune resume {run.path}")
    if target.exists():
        raise CommandError(f"{target} exists already", "Delete or rename it, or give another --output.")
    building = target.with_name(f".{target.name}")
    shutil.rmtree(building, ignore_errors=True)
    try:
        wanted = _Wanted(run, data, rows, progress)
        building.mkdir(parents=True)
        name = run.path.resolve().name
        adapter = building / f"{name}-adapter.gguf" if separate else None
        file = building / (f"base-{kind}.gguf" if separate else f"{name}-{kind}.gguf")
        _convert(run, file, adapter, kind, llama_cpp, progress)
        same, written, why_not = _prove(file, adapter, wanted, kind, progress)
        rename(building, target)
    except Exception as error:
        if not isinstance(error, OSError) and not is_disk_full(error):
            raise
        raise DiskFull(f"{target} could not be written: {error}", "Free some space and try again; nothing was kept.") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    placed = target / adapter.name if adapter else None
    return Exported(target, target / file.name, placed, target / "Modelfile" if written else None, why_not, same)


def require_converter(folder: Path) -> None:
    """Raise CommandError when the folder is no checkout of llama.cpp."""
    if not (folder / CONVERTER).is_file():
        raise CommandError(
            f"{folder} has no {CONVERTER}",
            "Give a checkout of llama.cpp:  git clone --depth 1 https://github.com/ggml-org/llama.cpp  and  "
            "--llama-cpp llama.cpp",
        )


class _Wanted:
    """What the adapter says: prompts of held-out rows, its greedy answers, and the tokens that end them."""

    def __init__(self, run: RunDirectory, data: str | None, most: int, progress: Progress) -> None:
        from finetune.data.tokens import Encoder
        from finetune.evaluate.answerer import Answerer, adapter_folder, answer_facts, is_plain, longest
        from finetune.evaluate.journal import Journal
        from finetune.evaluate.rows import held_out, own
        from finetune.evaluate.score import Made
        from finetune.evaluate.scores import scorer

        plan = read_plan(run.plan)
        self.tokenizer = run_tokenizer(run.data / "tokenizer", plan.settings)
        self.encoder = Encoder(self.tokenizer, conversations=self.tokenizer.chat_template is not None)
        self.plain = is_plain(run) or self.tokenizer.chat_template is None
        self.stops: set[int] = set(self.encoder.stops)
        found: EvalRows = own(data, plan.settings, self.tokenizer, most) if data else held_out(run, most)
        self.rows = replace(found, ids=[], labels=[])  # answers, not losses
        if not self.rows.prompt_ids:
            raise CommandError(f"{data or run.path} has no rows with prompts", "Give some: --data FILE")
        self.most = longest(self.tokenizer, self.rows.references) + 16
        self.context = max(map(len, self.rows.prompt_ids)) + self.most + 1
        journal = Journal(run.path / "evaluations", "tuned", answer_facts(run, plan, adapter_folder(run)))
        made = Made(functools.cache(lambda: Answerer(run)), journal, self.rows, "tuned", self.most, progress)
        self.answers: list[str] = made.scored(scorer("exact")).answers


def _convert(
    run: RunDirectory, file: Path, adapter: Path | None, kind: Kind, llama_cpp: Path, progress: Progress
) -> None:  # fmt: skip
    """Merge, or with an `adapter` take the base model; convert it to 16 bit, quantise. Only the GGUF files are left."""
    merged = file.parent / "merged"
    if adapter:
        _base_with_tokenizer(run, merged)
    else:
        merge(run, merged, progress=progress)
    size = sum(path.stat().st_size for path in merged.glob("*.safetensors"))
    if size > (free := free_disk_bytes(file)):
        raise DiskFull(
            f"the GGUF file needs {format_bytes(size)}, but {existing_parent(file)} has {format_bytes(free)} free",
            "Give another --output.",
        )
    _without_generation_marks(merged)
    progress("converting with llama.cpp")
    whole = file if kind == "f16" else file.with_name("f16.gguf")
    _run_converter(llama_cpp, pre_tokenizer(merged), CONVERTER, whole, str(merged))
    if adapter:
        _run_converter(llama_cpp, "-", "convert_lora_to_gguf.py", adapter, "--base", str(merged), str(run.adapter))
    shutil.rmtree(merged)
    if kind != "f16":
        progress(f"quantising to {kind}")
        _quantise(whole, file, kind)
        whole.unlink()


def _base_with_tokenizer(run: RunDirectory, folder: Path) -> None:
    """The base model's weights and configuration, with the tokenizer and the chat template of the training."""
    settings = read_plan(run.plan).settings
    folder.mkdir()
    for path in folder_of(settings).iterdir():
        if path.suffix == ".safetensors":
            link_or_copy(path.resolve(), folder / path.name)
        elif path.name in ("config.json", "generation_config.json") or path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    run_tokenizer(run.adapter, settings).save_pretrained(str(folder))


def _run_converter(llama_cpp: Path, pre: str, script: str, written: Path, *arguments: str) -> None:
    """Raises what the converter's last words say. It ends with this process, however: then its standard input is closed."""
    words = [sys.executable, "-P", "-m", "finetune.export.llama_converter", str(llama_cpp), pre, script, *arguments]
    how: dict[str, Any] = {"capture_output": True, "text": True, "encoding": "utf-8", "errors": "replace"}
    alive, held = os.pipe()
    try:
        done = subprocess.run([*words, "--outfile", str(written), "--outtype", "f16"], stdin=alive, **how)
    finally:
        os.close(alive)
        os.close(held)
    if done.returncode or not written.is_file():
        raise _why(done.stderr)


def _why(said: str) -> Exception:
    """What to raise for a converter that failed, from its last words."""
    lines = [line for line in said.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), lines[-1] if lines else "")
    if is_disk_full(OSError(said)) or re.search(r"\d+ requested and \d+ written", last):  # numpy's words for it
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "pre-tokenizer was not recognized" in last:
        return NotTheSame("tokens", "llama.cpp does not know this tokenizer")
    return CommandError(f"llama.cpp's converter failed: {last[:300]}", "A newer checkout of llama.cpp may know this model.")


def _quantise(source: Path, target: Path, kind: Kind) -> None:
    import llama_cpp

    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # else it prints a line for each tensor
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype = _FTYPES[kind]
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(how)) != 0:
        raise CommandError(f"llama.cpp could not quantise the model to {kind}", "Try --type f16.")


def pre_tokenizer(folder: Path) -> str:
    """llama.cpp's name of a tokenizer's first steps, for those it may not recognise by itself; `-` for others."""
    try:
        found = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("pre_tokenizer") or {}
    except (OSError, ValueError):
        return "-"
    steps = found.get("pretokenizers", [found])
    return _PRE.get(tuple(_step(step) for step in steps), "-")


def _step(step: dict[str, Any]) -> str:
    match step:
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return "byte-level"
    return "other"


def _without_generation_marks(folder: Path) -> None:
    """In the template of a model folder, transformers' marks of answers become a condition that other programs know."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        path.write_text(portable(path.read_text(encoding="utf-8")), encoding="utf-8")


def portable(template: str) -> str:
    """A chat template without `generation` marks, with the same text and the same trimmed spaces."""
    return _GENERATION.sub(lambda m: f"{{%{m['before']} {'endif' if m['end'] else 'if true'} {m['after']}%}}", template)


def _prove(
    file: Path, adapter: Path | None, wanted: _Wanted, kind: Kind, progress: Progress
) -> tuple[Same, bool, str | None]:  # fmt: skip
    """Compare the file with the adapter, stage by stage, and write the Modelfile. Raises NotTheSame."""
    with LlamaCpp(file, wanted.context, adapter) as loaded:
        progress("comparing tokens")
        prompts = check_tokens(loaded, wanted.tokenizer, wanted.rows.prompt_ids, wanted.stops)
        progress("comparing templates")
        texts = 0 if wanted.plain else check_template(loaded, wanted.encoder, wanted.rows.prompts)
        if not prompts + texts:
            raise NotTheSame("tokens", "no prompt's text gives its tokens again, so that they can't be compared")
        answers = check_answers(loaded, wanted.tokenizer, wanted.rows.prompt_ids, wanted.answers, wanted.stops, wanted.most,
                                kind, progress)  # fmt: skip
        why_not = _write_modelfile(file, adapter, loaded, wanted)
    return Same(prompts, texts, len(wanted.answers), answers), why_not is None, why_not


def _write_modelfile(file: Path, adapter: Path | None, loaded: LlamaCpp, wanted: _Wanted) -> str | None:
    """Write the Modelfile beside the file; returns why not."""
    if wanted.plain:
        return "trained on prompts without a chat template"
    template = wanted.encoder.template
    assert template is not None
    bos = wanted.tokenizer.bos_token if loaded.adds_bos and wanted.tokenizer.bos_token else ""
    try:
        form = role_form(
            lambda messages, prompt: template.render(messages, prompt=prompt), bos=bos, writes_today=template.writes_today
        )
    except NotProven as reason:
        return f"this chat template can't be written for Ollama: {reason}"
    for prompt in wanted.rows.prompts:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        if loaded.ids(form.text(messages), bos=loaded.adds_bos) != wanted.encoder.prompt_ids(messages):
            return "this chat template can't be written for Ollama: llama.cpp cuts its text in another way"
    stops = [str(wanted.tokenizer.decode([stop])) for stop in sorted(wanted.stops)]
    text = modelfile(file.name, form, stops, adapter.name if adapter else None)
    (file.parent / "Modelfile").write_text(text, encoding="utf-8")
    return None
