"""Whether a GGUF file, loaded by llama.cpp, is the model that was trained: its tokens, its template, its answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.data.tokens import Encoder
from finetune.errors import DataError, FinetuneError, PackagesError
from finetune.export.ollama import conversations

#: Smallest share of held-out rows with the adapter's answer; the quantised types change those that were nearly a tie.
LEAST_SAME = {"f16": 0.95, "q8_0": 0.5, "q4_k_m": 0.5}


class NotTheSame(FinetuneError):
    """The exported file is not the trained model: `stage` says where they first part."""

    title = "The exported file is not the trained model"

    def __init__(self, stage: str, problem: str) -> None:
        self.stage = stage
        super().__init__(f"stage {stage}: {problem}", "Nothing was kept. The merged model is unaffected: finetune merge RUN")

    def as_json(self) -> dict:
        """With the stage."""
        return {**super().as_json(), "stage": self.stage}


@dataclass(frozen=True)
class Same:
    """What was compared: prompts with equal token ids, conversations with the same text, and equal greedy answers."""

    prompts: int
    conversations: int
    rows: int
    same_answers: int

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


class LlamaCpp:
    """A GGUF file in llama.cpp, on the processor. Use it with `with`."""

    def __init__(self, path: Path, context: int, adapter: Path | None = None) -> None:
        import llama_cpp

        try:
            self._model = llama_cpp.Llama(str(path), n_ctx=context, n_gpu_layers=0, verbose=False,
                                          lora_path=str(adapter) if adapter else None)  # fmt: skip
        except (ValueError, RuntimeError) as error:
            raise NotTheSame("loading", f"llama.cpp can't load the file: {error}") from None
        self._library = llama_cpp

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        self._model.close()

    @property
    def adds_bos(self) -> bool:
        """Whether programs put a BOS token before the text."""
        return str(self._model.metadata.get("tokenizer.ggml.add_bos_token", "false")).lower() == "true"

    def ids(self, text: str, *, bos: bool = False) -> list[int]:
        """Tokens of a rendered prompt."""
        return list(self._model.tokenize(text.encode(), add_bos=bos, special=True))

    def ends(self, token: int) -> bool:
        """Whether llama.cpp ends an answer at this token."""
        model = self._model._model
        return bool(self._library.llama_vocab_is_eog(model.vocab, token))

    def render(self, messages: list[Any], *, bos: str, eos: str) -> str:
        """A conversation with the file's template, as llama.cpp's Python server writes it. Raises what the template raises."""
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        template = self._model.metadata.get("tokenizer.chat_template", "")
        return str(Jinja2ChatFormatter(template=template, eos_token=eos, bos_token=bos)(messages=messages).prompt)

    def answer(self, prompt: list[int], stops: set[int], most: int) -> list[int]:
        """Greedy tokens until a stop, which is left out."""
        made: list[int] = []
        with contextlib.closing(self._model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)) as tokens:
            for token in tokens:
                if token in stops or self.ends(token):
                    break
                made.append(int(token))
                if len(made) == most:
                    break
        return made


def check_tokens(file: LlamaCpp, tokenizer: Any, prompts: list[list[int]], stops: set[int]) -> int:
    """Compare the tokens of the prompts, from their text. Returns how many were. Raises NotTheSame."""
    compared = 0
    for row, ids in enumerate(prompts, start=1):
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            continue  # a row with the text of a special token, which stays text: only the tokens can say that
        found, compared = file.ids(text), compared + 1
        if found != ids:
            place = next((at for at, (one, other) in enumerate(zip(ids, found, strict=False)) if one != other), len(found))
            near = tokenizer.decode(ids[max(0, place - 3) : place + 3])
            raise NotTheSame("tokens", f"row {row}, token {place + 1}: llama.cpp cuts {near!r} in another way")
    silent = [tokenizer.decode([stop]) for stop in sorted(stops) if not file.ends(stop)]
    if silent:
        raise NotTheSame("tokens", f"llama.cpp would not end an answer at {', '.join(silent)}, as the training does")
    return compared


def check_template(file: LlamaCpp, encoder: Encoder, prompts: list[str]) -> int:
    """Compare tokens of conversations: the file's template against the training's. Returns how many. Raises NotTheSame."""
    tokenizer, compared = encoder.tokenizer, 0
    special = {name: getattr(tokenizer, f"{name}_token") or "" for name in ("bos", "eos")}
    asked: list[list[Any]] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    for messages in [*asked, *conversations(with_system=True)]:
        try:
            expected = encoder.prompt_ids(messages)
        except DataError:
            continue  # of a role that the training's template refuses
        compared += 1
        try:
            text = file.render(messages, **special)
        except Exception as error:  # noqa: BLE001 - whatever a template raises
            raise NotTheSame("template", f"the file's template can't write {len(messages)} messages: {error}") from None
        if file.ids(text) != expected:
            before = tokenizer.decode(expected)
            raise NotTheSame("template", f"the file writes {text[:200]!r}, the training {before[:200]!r}")
    return compared


def check_answers(
    file: LlamaCpp, tokenizer: Any, prompts: list[list[int]], answers: list[str], stops: set[int], most: int, kind: str,
    progress: Callable[[str], None],
) -> int:  # fmt: skip
    """Compare greedy answers with the adapter's. Returns how many are the same. Raises NotTheSame below the type's share."""
    made = []
    for row, prompt in enumerate(prompts, start=1):
        made.append(tokenizer.decode(file.answer(prompt, stops, most), skip_special_tokens=True))
        progress(f"answering with llama.cpp: {row} of {len(prompts)}")
    same = sum(one == other for one, other in zip(made, answers, strict=True))
    if same < LEAST_SAME[kind] * len(answers):
        row = next(at for at, (one, other) in enumerate(zip(made, answers, strict=True)) if one != other)
        raise NotTheSame(
            "logits",
            f"{same} of {len(answers)} answers are the adapter's, fewer than {LEAST_SAME[kind]:.0%}; row {row + 1}: "
            f"{made[row][:80]!r}, the adapter {answers[row][:80]!r}",
        )  # fmt: skip
    return same


def require_llama_cpp() -> None:
    """Raise PackagesError without the package that loads the file."""
    if find_spec("llama_cpp") is None:
        raise PackagesError("GGUF files are tried with llama-cpp-python, which is not installed",
                           'Install it: pip install "llama-cpp-python>=0.3.36,<0.4" sentencepiece')  # fmt: skip
