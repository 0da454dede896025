"""A checkpoint counts only when it is whole: every fault in any of its files is found, and the older one is used."""

import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import flip_one_byte

from finetune.files import MANIFEST
from finetune.run.seal import fact_differences, newest_verified, rotate, seal, verify

FACTS = {"lora_r": 16, "data": "abc"}


def sealed(checkpoints, step):
    folder = checkpoints / ".partial" / f"checkpoint-{step}"
    (folder / "sub").mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "optimizer.pt").write_bytes(b"o" * 5000)
    (folder / "sub" / "rng_state.pth").write_bytes(b"r" * 100)
    return seal(folder, checkpoints / f"checkpoint-{step}", step, FACTS)


FAULTS = {
    "removed": Path.unlink, "flipped": flip_one_byte, "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.pt", "sub/rng_state.pth", MANIFEST])
def test_a_fault_in_any_file_is_found_and_the_older_seal_is_used(tmp_path, fault, name):
    sealed(tmp_path, 10)
    fault(sealed(tmp_path, 20) / name)
    checkpoint, skipped = newest_verified(tmp_path)
    assert (checkpoint.step, checkpoint.facts) == (10, FACTS)
    assert len(skipped) == 1 and "checkpoint-20" in skipped[0]


def test_every_single_bit_of_the_manifest_counts(tmp_path):
    folder = sealed(tmp_path, 10)
    manifest = folder / MANIFEST
    good = manifest.read_bytes()
    for offset in range(0, len(good), 7):
        broken = bytearray(good)
        broken[offset] ^= 1
        manifest.write_bytes(broken)
        try:
            unchanged = json.loads(broken) == json.loads(good)  # a changed blank changes nothing
        except ValueError:
            unchanged = False
        assert unchanged or verify(folder), f"byte {offset}"


def test_a_checkpoint_without_a_seal_or_under_another_name_does_not_count_and_a_changed_setting_is_named(tmp_path):
    (tmp_path / "checkpoint-30").mkdir()
    shutil.copytree(sealed(tmp_path, 10), tmp_path / "checkpoint-99")
    checkpoint, skipped = newest_verified(tmp_path)
    assert checkpoint.step == 10 and "manifest is for step 10" in skipped[0] and "incomplete (no manifest)" in skipped[1]
    assert fact_differences(FACTS, {**FACTS, "lora_r": 8}) == ["lora_r was 16 and is now 8"]


@pytest.mark.parametrize(("keep", "best", "removed"), [(2, None, [20, 10]), (1, 20, [30, 10])])
def test_rotation_keeps_the_newest_and_the_best(tmp_path, keep, best, removed):
    for step in (10, 20, 30, 40):
        sealed(tmp_path, step)
    assert [path.name for path in rotate(tmp_path, keep, best)] == [f"checkpoint-{step}" for step in removed]
    remaining = {f"checkpoint-{step}" for step in (10, 20, 30, 40) if step not in removed}
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == remaining


def test_rotation_never_removes_the_only_good_one(tmp_path):
    sealed(tmp_path, 10)
    flip_one_byte(sealed(tmp_path, 20) / "optimizer.pt")
    assert rotate(tmp_path, keep=1) == []
    assert newest_verified(tmp_path)[0].step == 10
    sealed(tmp_path, 30)  # of a run that resumed past the damaged one
    assert not rotate(tmp_path, keep=2)
