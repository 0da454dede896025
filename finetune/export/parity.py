"""Compare a GGUF file in llama.cpp with the trained model: tokens, template, answers."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.data.template import common_prefix_length
from finetune.data.tokens import Encoder
from finetune.errors import CommandError, DataError, FinetuneError
from finetune.export import GGUF_TYPES
from finetune.export.ollama import conversations
from finetune.units import Progress

#: llama.cpp's own script, and the command that fetches it.
CONVERTER, _CLONE = "convert_hf_to_gguf.py", "git clone --depth 1 https://github.com/ggml-org/llama.cpp"


class ParityError(FinetuneError):
    """The exported file differs from the trained model, first in `stage`."""

    title = "The exported file is not the trained model"

    def __init__(self, stage: str, problem: str) -> None:
        self.stage = stage
        super().__init__(
            f"stage {stage}: {problem}", "The exported files were deleted. Merging still works: finetune merge RUN"
        )

    def as_json(self) -> dict:
        return {**super().as_json(), "stage": self.stage}


@dataclass(frozen=True)
class ParityReport:
    """Counts of a comparison."""

    prompts: int  # prompts with equal tokens
    conversations: int  # conversations with equal tokens
    #: Held-out prompts answered, and greedy answers that equal the adapter's.
    rows: int
    same_answers: int


class LlamaCpp(contextlib.AbstractContextManager["LlamaCpp"]):
    """A GGUF file opened in llama.cpp on the CPU; a context manager."""

    def __init__(self, path: Path, context: int, adapter: Path | None = None) -> None:
        import llama_cpp

        try:
            self._model = llama_cpp.Llama(str(path), n_ctx=context, n_gpu_layers=0, verbose=False,
                                          lora_path=str(adapter) if adapter else None)  # fmt: skip
        except (ValueError, RuntimeError) as error:
            raise ParityError("loading", f"llama.cpp can't load the file: {error}") from None
        self._library = llama_cpp

    def __exit__(self, *_: object) -> None:
        self._model.close()

    @property
    def adds_bos(self) -> bool:
        # whether programs add a BOS token before the text
        return str(self._model.metadata.get("tokenizer.ggml.add_bos_token", "false")).lower() == "true"

    def tokenise(self, text: str, *, bos: bool = False) -> list[int]:
        return list(self._model.tokenize(text.encode(), add_bos=bos, special=True))

    def ends_answer(self, token: int) -> bool:
        return bool(self._library.llama_vocab_is_eog(self._model._model.vocab, token))

    def render(self, messages: list[Any], *, bos: str, eos: str) -> str:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        template = self._model.metadata.get("tokenizer.chat_template", "")
        # as llama.cpp's Python server does
        return str(Jinja2ChatFormatter(template=template, eos_token=eos, bos_token=bos)(messages=messages).prompt)

    def answer(self, prompt: list[int], stops: set[int], max_tokens: int) -> list[int]:
        """Return greedy tokens up to a stop token."""
        answer_ids: list[int] = []
        with contextlib.closing(self._model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)) as tokens:
            for token in tokens:
                if token in stops or self.ends_answer(token):
                    break
                answer_ids.append(int(token))
                if len(answer_ids) == max_tokens:
                    break
        return answer_ids


def check_tokens(file: LlamaCpp, tokenizer: Any, prompts: list[list[int]], stops: set[int]) -> int:
    """Compare the tokens of prompts, and return the number compared. Raise ParityError."""
    compared = 0
    for row, ids in enumerate(prompts, start=1):
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            continue  # the row has a special token's name as plain text, which decoding can't show
        file_ids = file.tokenise(text)
        compared += 1
        if file_ids != ids:
            index = common_prefix_length(ids, file_ids)
            excerpt = tokenizer.decode(ids[max(0, index - 3) : index + 3])
            raise ParityError("tokens", f"row {row}, token {index + 1}: llama.cpp tokenises {excerpt!r} differently")
    if unknown_stops := [tokenizer.decode([stop]) for stop in sorted(stops) if not file.ends_answer(stop)]:
        raise ParityError("tokens", f"llama.cpp would not end an answer at {', '.join(unknown_stops)}, as the training does")
    return compared


def check_template(file: LlamaCpp, encoder: Encoder, prompts: list[str]) -> int:
    """Compare conversations in both templates, and return the number compared. Raise ParityError."""
    tokenizer, compared = encoder.tokenizer, 0
    special = {name: getattr(tokenizer, f"{name}_token") or "" for name in ("bos", "eos")}
    prompt_conversations: list[list[Any]] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    for messages in [*prompt_conversations, *conversations(with_system=True)]:
        try:
            expected = encoder.prompt_ids(messages)
        except DataError:
            continue  # the training's template refuses one of its roles
        compared += 1
        try:
            text = file.render(messages, **special)
        except Exception as error:  # noqa: BLE001 - whatever a template raises
            raise ParityError("template", f"the file's template can't write {len(messages)} messages: {error}") from None
        if file.tokenise(text) != expected:
            expected_text = tokenizer.decode(expected)
            raise ParityError("template", f"the file writes {text[:200]!r}, the training wrote {expected_text[:200]!r}")
    return compared


def check_answers(
    file: LlamaCpp, tokenizer: Any, prompts: list[list[int]], answers: list[str], stops: set[int], max_tokens: int,
    gguf_type: str, progress: Progress,
) -> int:  # fmt: skip
    """Compare greedy answers, and return how many are equal. Raise ParityError."""
    file_answers = []
    for row, prompt in enumerate(prompts, start=1):
        file_answers.append(tokenizer.decode(file.answer(prompt, stops, max_tokens), skip_special_tokens=True))
        progress(f"answering with llama.cpp: {row} of {len(prompts)}")
    is_equal = [file_answer == answer for file_answer, answer in zip(file_answers, answers, strict=True)]
    equal_answers = sum(is_equal)
    # quantising changes tokens that were nearly tied, so the share depends on the type
    min_share = GGUF_TYPES[gguf_type].min_same_answers
    if equal_answers < min_share * len(answers):
        row = is_equal.index(False)
        raise ParityError(
            "logits",
            f"{equal_answers} of {len(answers)} answers match the adapter's, fewer than {min_share:.0%}; row {row + 1}: "
            f"{file_answers[row][:80]!r}, the adapter answered {answers[row][:80]!r}",
        )  # fmt: skip
    return equal_answers


def require_llama_cpp(checkout: Path) -> None:
    """Raise CommandError for a missing converter or package."""
    problems, fixes = [], []
    if not (checkout / CONVERTER).is_file():
        problems.append(f"llama.cpp's converter is missing: there is no {checkout / CONVERTER}")
        fixes += ["Clone llama.cpp into the working directory, or set FINETUNE_LLAMA_CPP to its folder:", _CLONE]
    if find_spec("llama_cpp") is None:
        problems.append("llama-cpp-python is missing; it checks the GGUF file")
        fixes.append('Install it: pip install "llama-cpp-python>=0.3.36,<0.4" sentencepiece')
    if problems:
        raise CommandError(problems, "\n".join(fixes))
