"""A merge that is killed at any moment leaves nothing under its name; the next one cleans up and gives the whole model."""

import gc
import os

import pytest
from safetensors.torch import load_file

from finetune.export import merge as merging
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
        child = os.fork()
        if not child:
            remaining, read = [moment * 5], merging._read

            def counted(function, remaining=remaining):
                def call(*arguments):
                    remaining[0] -= 1
                    if remaining[0] < 0:
                        os._exit(9)
                    return function(*arguments)

                return call

            merging._read = counted(read)
            merge(run, home / "merged")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert not (home / "merged").exists()
        leftovers = home / ".merged"
        assert not list(leftovers.glob("*.json")), "without config.json nothing loads what was written"
    check_weights(merge(run, home / "merged"))
    assert not (home / ".merged").exists()
    assert all((path.stat().st_mode & 0o044) == 0o044 for path in (home / "merged").iterdir())


def test_the_size_of_files_is_respected_and_a_wrong_one_refused(run, home, finetune):
    code, shown = finetune("merge", run.path, "--max-shard-size", "1MiB", "--output", "merged")
    assert code == 0, shown
    paths = sorted((home / "merged").glob("model-*.safetensors"))
    assert len(paths) > 2 and sum(len(load_file(path)) for path in paths) == 47
    for size, message in {"much": "is not a size", "3": "less than 1 MiB"}.items():
        code, shown = finetune("merge", run.path, "--max-shard-size", size, "--output", "other")
        assert code == 2 and message in shown
