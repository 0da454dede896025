"""Types of GGUF files that can be exported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgufType:
    """A type of GGUF file."""

    #: On the page.
    label: str
    #: Smallest share of held-out rows with the adapter's answer; quantised types change answers that were nearly a tie.
    min_same_answers: float = 0.5
    #: llama.cpp's number of a quantised type, LLAMA_FTYPE_MOSTLY_* in
    #: https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h.
    file_type: int | None = None


GGUF_TYPES = {
    "f16": GgufType("16 bit", 0.95), "q8_0": GgufType("Q8_0", file_type=7), "q4_k_m": GgufType("Q4_K_M", file_type=15),
}  # fmt: skip
