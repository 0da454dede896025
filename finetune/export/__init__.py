"""Export: the tuned model for other programs. Here are the values that help, checks and the model card read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Target(NamedTuple):
    """A form of a run's result that `finetune push` sends."""

    title: str  # in the model card's title
    #: `base_model_relation` and `library_name` on the hub.
    relation: str
    library: str
    folder: str  # folder in the run; empty for files that the user names


TARGETS = {
    "adapter": Target("LoRA adapter", "adapter", "peft", "adapter"),
    "merged": Target("merged model", "finetune", "transformers", "merged"),
    "gguf": Target("GGUF", "quantized", "gguf", ""),
}
#: Values of `finetune export --to`. cli/export.py writes GGUF for each: another format needs a branch there,
#: and an entry in app/pages/run.py and app/templates/use.html.
LAYOUTS = {"gguf": "one file", "gguf-adapter": "base and adapter in two files"}


@dataclass(frozen=True)
class GgufType:
    """A type of GGUF file."""

    label: str  # on the page
    #: Smallest share of held-out rows with the adapter's answer; quantised types change answers that were nearly a tie.
    min_same_answers: float = 0.5
    #: llama.cpp's number of a quantised type, LLAMA_FTYPE_MOSTLY_* in
    #: https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h.
    file_type: int | None = None


GGUF_TYPES = {
    "f16": GgufType("16 bit", 0.95), "q8_0": GgufType("Q8_0", file_type=7), "q4_k_m": GgufType("Q4_K_M", file_type=15),
}  # fmt: skip
