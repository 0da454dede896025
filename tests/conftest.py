"""State in a temporary home, one thread per process, no network: set before anything heavy is imported."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """No test reads or writes the user's caches, and every test starts in a folder of its own."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("FINETUNE_CACHE", str(folder / "cache"))
    monkeypatch.chdir(folder)
    return folder


def pytest_collection_modifyitems(config, items):
    """Tests of a real card are left out where there is none."""
    if not Path("/proc/driver/nvidia/version").exists():
        absent = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=absent)
        items[:] = [item for item in items if item not in absent]
