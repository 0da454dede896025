"""Fixtures of the data tests: the small tokenizer, and files of rows."""

from __future__ import annotations

import json

import pytest
from small_data import build_tokenizer


@pytest.fixture
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def write(tmp_path):
    """write(name, rows or text or bytes) -> path as text; rows become JSON Lines."""

    def write_file(name: str, content) -> str:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8", newline="")
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
        return str(path)

    return write_file
