"""A merge that is killed at any moment leaves nothing under its name; the next one cleans up and gives the whole model."""

import gc
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from finetune.export import shards
from finetune.export.merge import merge
from finetune.model.weights import check_weights
from finetune.run.directory import RunDirectory

pytestmark = pytest.mark.slow


@pytest.fixture
def run(home, kept_run):
    return RunDirectory(kept_run(home))


def test_a_merge_killed_at_ten_moments_leaves_nothing_that_looks_finished(run, home):
    gc.freeze()
    for moment in range(10):
        if not os.fork():
            left, copy, applied = [moment * 5], shards._copy, shards.Changes.applied

            def counted(function, left=left):
                def call(*arguments):
                    left[0] -= 1
                    if left[0] < 0:
                        os._exit(9)
                    return function(*arguments)

                return call

            shards._copy, shards.Changes.applied = counted(copy), counted(applied)
            merge(run, home / "merged")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 9
        assert not (home / "merged").exists()
        left_over = home / ".merged"
        assert not list(left_over.glob("*.json")), "without config.json nothing loads what was written"
    check_weights(merge(run, home / "merged"))
    assert not (home / ".merged").exists()
    assert all((path.stat().st_mode & 0o044) == 0o044 for path in (home / "merged").iterdir())


def test_a_size_of_files_and_what_can_not_be_one(run, home):
    def finetune(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "finetune", "merge", str(run.path), *arguments], capture_output=True, text=True
        )

    done = finetune("--max-shard-size", "1MiB", "--output", "merged")
    assert done.returncode == 0, done.stderr
    paths = sorted((home / "merged").glob("model-*.safetensors"))
    assert len(paths) > 2 and sum(len(load_file(path)) for path in paths) == 47
    for size, said in {"much": "is not a size", "3": "less than 1 MiB"}.items():
        done = finetune("--max-shard-size", size, "--output", "other")
        assert done.returncode == 2 and said in done.stderr.replace("\n", " ")


def test_what_merging_changes_is_measured_on_held_out_rows(run, home):
    from finetune.export.changed import what_merging_changes

    folder = merge(run, home / "merged")
    same = what_merging_changes(run, folder, 4, lambda _: None)
    assert (same.rows, same.answers_changed) == (4, 0) and same.merged_loss == pytest.approx(same.loss, rel=1e-3)
    values = load_file(folder / "model.safetensors")
    for name in values:
        if "mlp" in name:
            values[name] = values[name] * 0
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    other = what_merging_changes(run, folder, 4, lambda _: None)
    assert other.answers_changed > 0 and other.merged_loss != pytest.approx(other.loss, rel=1e-2)
    assert (other.loss, list((run.path / "evaluations").glob("merged*"))) == (same.loss, [])
