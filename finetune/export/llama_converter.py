"""Run llama.cpp's converters: `python -m finetune.export.llama_converter LLAMA_CPP PRE SCRIPT ARGUMENTS...`."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

#: File in the model's folder: names of the run's new tokens.
NEW_TOKENS = "new_tokens.json"


def main() -> None:
    """Patch the converter, and run the script."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    folder, fallback_name, script, *arguments = sys.argv[1:]
    sys.path[:0] = [folder, f"{folder}/gguf-py"]
    converter: Any = importlib.import_module("convert_hf_to_gguf")
    models: Any = sys.modules.get("conversion.base", converter)  # newer versions have the classes there
    recognise = models.TextModel.get_vocab_base_pre

    # llama.cpp recognises a pre-tokenizer by how it tokenises one text, and refuses unknown ones. For these PRE is the name to
    # use, or `-`; `check_tokens` later compares the tokens of the held-out rows.
    def pre_tokenizer_name(self: Any, tokenizer: Any) -> str:
        try:
            return str(recognise(self, tokenizer))
        except NotImplementedError:
            if fallback_name == "-":
                raise
            return fallback_name

    models.TextModel.get_vocab_base_pre = pre_tokenizer_name
    # llama.cpp would take a new token like <|name|> for a control token, and leave it out of answers
    seems_special = models.TextModel.does_token_look_special
    models.TextModel.does_token_look_special = lambda self, token: token not in new_tokens(self) and seems_special(self, token)
    sys.argv = [script, *arguments]
    if script == "convert_hf_to_gguf.py":
        converter.main()
    else:
        runpy.run_path(f"{folder}/{script}", run_name="__main__")


@lru_cache(maxsize=1)
def new_tokens(model: Any) -> frozenset[str]:
    """Return the new tokens of the run."""
    path = Path(model.dir_model) / NEW_TOKENS
    return frozenset(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else frozenset()


def _end_with_parent() -> None:
    while os.read(0, 4096):  # stdin ends when the parent is killed: the next export writes files of the same names
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
