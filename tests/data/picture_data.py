"""Pictures made on the spot, and a chat template that writes a token for each."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

#: Writes content parts as Qwen's vision templates do.
VISION_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image_pad|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def picture(width: int = 8, height: int = 6, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image | None = None, kind: str = "PNG", **options) -> bytes:
    """A picture's file."""
    buffer = io.BytesIO()
    (image or picture()).save(buffer, kind, **options)
    return buffer.getvalue()


def png_of_size(width: int, height: int, *, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG whose header claims a size, with a few bytes of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


class OneTokenEach:
    """A processor for tests of reading: a picture stays the one token that the template writes."""

    def expanded(self, rendered, pictures):
        """The text as it is."""
        return rendered


@pytest.fixture(autouse=True)
def pictures_stay_one_token(monkeypatch):
    """The tiny model has no processor; that of a model is tried in tests/methods/test_pictures_are_trls.py."""
    monkeypatch.setattr("finetune.data.tokenizer.ProcessorLoader.__call__", lambda *_: OneTokenEach())
