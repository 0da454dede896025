"""Broken pictures and rows of pictures are refused by name, with bounded memory."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from picture_data import encoded, picture, png_of_size
from PIL import Image
from small_data import read_examples, recipe

from finetune.data.pictures.source import BadPicture, PictureSource, checked_size, digest_of, open_picture

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
WHOLE = {kind: encoded(picture(40, 30), kind) for kind in KINDS}
FRAMES = {"save_all": True, "append_images": [picture(40, 30, seed=1)]}
FLOAT = Image.fromarray(np.ones((9, 9), np.float32))
INTEGER = Image.fromarray(np.ones((9, 9), np.int32))


def _files():
    """Name -> the bytes of a picture that can't be trained on, and what is said of it."""
    for kind in KINDS:
        content = WHOLE[kind]
        yield f"{kind} cut in half", content[: len(content) // 2], "truncated|damaged|not an image|is empty"
        yield f"{kind} without its beginning", content[9:], "not an image|damaged"
    for width, height in ((50_000, 50_000), (8001, 8000), (2**31 - 1, 2**31 - 1), (1, 10**9)):
        yield f"PNG that claims {width} x {height}", png_of_size(width, height), "megapixels|pixels"
    for width, height in ((1, 9), (3, 3), (800, 4), (4, 801)):
        yield f"{width} x {height} pixels", encoded(picture(width, height)), "shorter side|as long as the other"
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        yield f"{kind} of two frames", encoded(picture(40, 30), kind, **FRAMES), "animated"
    for name, image in (("32 bit floats", FLOAT), ("32 bit integers", INTEGER)):
        yield name, encoded(image, "TIFF"), "mode [FI]"
    yield "PNG with too few pixels", png_of_size(900, 900), "damaged|truncated"
    yield "PNG with a wrong checksum", WHOLE["PNG"][:29] + b"\0\0\0\0" + WHOLE["PNG"][33:], "damaged|not an image"
    yield "TIFF whose directory leads to itself", b"II*\0\x08\0\0\0\x00\x00\x08\0\0\0", "damaged|not an image"
    lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n"
    for name, content in (("nothing", b""), ("zeros", bytes(500)), ("LFS", lfs), ("icon", encoded(kind="ICO"))):
        yield name, content, "not an image|is empty|damaged"


#: Name -> a path that leads to no picture of the folder.
PATHS = {
    "folder": "folder", "outside": "../ok.png", "outside by a detour": "folder/../../ok.png", "absolute": "/etc/hostname",
    "device": "/dev/zero", "pipe": "pipe", "loop of links": "loop", "long name": "x" * 5000,
    "file": "file:///etc/hostname", "base64 of a damaged picture": base64.b64encode(WHOLE["JPEG"][:90]).decode(),
}  # fmt: skip
CASES = {
    **{f"file: {name}": ({"image": "broken", "text": "A cat."}, content, reason) for name, content, reason in _files()},
    **{f"value: {name}": ({"question": "What?", "answer": "A cat.", "images": path}, None, "") for name, path in PATHS.items()},
}
#: A row of each format, beside which a broken one stands.
GOOD = ({"question": "<image>What?", "answer": "A cat.", "image": "ok.png"}, {"text": "A cat.", "image": "ok.png"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures")
    (path / "ok.png").write_bytes(WHOLE["PNG"])
    (path / "data").mkdir()
    (path / "data" / "ok.png").write_bytes(WHOLE["PNG"])
    (path / "data" / "folder").mkdir()
    (path / "data" / "loop").symlink_to("loop")
    os.mkfifo(path / "data" / "pipe")
    return path / "data"


@pytest.mark.parametrize("name", CASES)
def test_a_broken_picture_is_refused_by_name_and_the_others_are_read(name, folder, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(folder / "cache"))
    row, content, reason = CASES[name]
    if content is not None:
        (folder / "broken").write_bytes(content)
    good = next(values for values in GOOD if values.keys() & row.keys() - {"image"})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(values) + "\n" for values in (good, row, good)), encoding="utf-8")
    rows = read_examples(recipe(str(path)).dataset).train
    assert [example.row for example in rows.examples] == [1, 3]
    (refused,) = rows.refused
    assert refused.row == 2 and re.search(reason, refused.reason), refused


@pytest.mark.parametrize("seed", range(40))
def test_what_passes_the_check_can_be_opened(seed, tmp_path):
    generator = np.random.default_rng(seed)
    content = np.frombuffer(WHOLE[KINDS[seed % len(KINDS)]], np.uint8).copy()
    content[generator.integers(0, len(content), 3)] = generator.integers(0, 255, 3)
    try:
        size = checked_size(content.tobytes())
    except BadPicture:
        return
    (tmp_path / "picture").write_bytes(content.tobytes())
    assert open_picture(PictureSource(tmp_path / "picture", digest_of(content.tobytes()), *size)).size == size


_BOMBS = """
import resource, struct, sys
sys.path.insert(0, sys.argv[1])
from picture_data import png_of_size
from finetune.data.pictures.source import BadPicture, checked_size
side = 50_000
bombs = {
    "PNG": png_of_size(side, side),
    "BMP": b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0),
    "GIF": b"GIF89a" + struct.pack("<HHBBBBHHHHB", side, side, 0, 0, 0, 44, 0, 0, side, side, 0) + b"\\2\\2L\\1\\0;",
    "PPM": b"P6 50000 50000 255\\n",
    "WEBP": bytes.fromhex("524946461a000000574542505650384c0e0000002ffebfff0f071011fd0f4444ff03"),
}
resource.setrlimit(resource.RLIMIT_DATA, (1 << 29, 1 << 29))
for kind, content in bombs.items():
    try:
        checked_size(content)
    except BadPicture as error:
        print(kind, error)
status = open("/proc/self/status").read()  # getrusage has the peak of the process that started this one, too
print(int(status.split("VmHWM:")[1].split()[0]) // 1024)
"""


def test_bombs_are_refused_by_their_header_with_bounded_memory():
    command = [sys.executable, "-c", _BOMBS, str(Path(__file__).parent)]
    *refusals, peak_mib = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in refusals] == ["PNG", "BMP", "GIF", "PPM", "WEBP"]
    assert all("megapixels; the limit is 64 megapixels" in line for line in refusals[:4]), refusals  # WebP: no decoder of 2 GB
    assert int(peak_mib) < 400
