"""Rows in, tokens with labels out. The names here are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.data.examples import read_examples
    from finetune.data.packing import pack
    from finetune.data.preparation import EncodedRows, PreparedData, SelectedRows, encode, prepare
    from finetune.data.tokenizer import load_tokenizer
    from finetune.data.tokens import Encoder
    from finetune.data.trained_spans import example_spans

_MODULES = {
    "Encoder": "tokens", "PreparedData": "preparation", "EncodedRows": "preparation",
    "SelectedRows": "preparation", "encode": "preparation",
    "load_tokenizer": "tokenizer", "example_spans": "trained_spans", "pack": "packing", "prepare": "preparation",
    "read_examples": "examples",
}  # fmt: skip

__all__ = [
    "Encoder", "EncodedRows", "PreparedData", "SelectedRows", "encode", "load_tokenizer", "example_spans", "pack",
    "prepare", "read_examples",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"finetune.data.{_MODULES[name]}"), name)
