"""State in a temporary home, one thread per process, no network, bytecode: set before anything heavy is imported."""

import functools
import gc
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# else each process compiles the tests, the package and the page for itself
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest  # noqa: E402
from filelock import FileLock  # noqa: E402
from warm import CLIENT, start_server  # noqa: E402

from finetune.system import raise_gc_thresholds  # noqa: E402

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its words would come after pytest's closing line
raise_gc_thresholds()  # each process imports all that a run does


@pytest.fixture(scope="session")
def forecasts(tmp_path_factory):
    """Dry runs are the same for every test and kept for the session; tests of the dry run and its speed start without."""
    return of_all_processes(tmp_path_factory, "forecasts")


def of_all_processes(tmp_path_factory, name):
    """A folder that all processes of the session share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def cached_model(monkeypatch, tmp_path):
    """The bundled model in a hub cache as owner/name; the folder of its snapshot."""
    from finetune.bundled import model_path

    repo = tmp_path / "hub" / "models--owner--name"
    snapshot = Path(shutil.copytree(model_path("tiny"), repo / "snapshots" / ("a" * 40)))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


@pytest.fixture(scope="session")
def picture_model(tmp_path_factory):
    """picture_model(kind) -> the folder of a small model of images and text, saved once."""
    from picture_models import save_picture_model

    return functools.cache(lambda kind: save_picture_model(kind, tmp_path_factory.mktemp(kind) / kind))


@pytest.fixture(scope="session")
def shipped_run(tmp_path_factory):
    """The folder where `finetune run tiny-cpu --json` was run, and what it printed; once for all tests."""
    folder = of_all_processes(tmp_path_factory, "shipped")
    printed = folder / "printed.jsonl"
    with FileLock(folder / "lock"):
        if not printed.exists():
            command = [sys.executable, "-m", "finetune", "run", "tiny-cpu", "--json"]
            environment = {**os.environ, "FINETUNE_CACHE": str(folder / "cache")}
            ended = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
            assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
            printed.write_text(ended.stdout, encoding="utf-8")
    return folder, printed.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def home(request, tmp_path_factory, monkeypatch, forecasts):
    """No test reads or writes the user's caches, and every test starts in a folder of its own."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "cache").mkdir()
    if request.path.stem not in ("test_dry_run", "test_sharding", "test_planning_is_quick"):
        (folder / "cache" / "forecasts").symlink_to(forecasts)
    monkeypatch.setenv("FINETUNE_CACHE", str(folder / "cache"))
    monkeypatch.chdir(folder)
    environment = dict(os.environ)
    yield folder
    if dict(os.environ) != environment:  # TrainingArguments(torch_compile=True) switches compiling on for the whole process
        os.environ.clear()
        os.environ.update(environment)


class Shown(str):
    """What a command printed, as one line; `out` and `err` are as printed."""

    out = err = ""


@pytest.fixture
def finetune(monkeypatch, capsys):
    """finetune(*arguments) -> exit code and what was printed."""
    from finetune.cli import main

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["finetune", *map(str, arguments)])
        code, printed = main(), capsys.readouterr()
        shown = Shown(" ".join("".join(printed).split()))
        shown.out, shown.err = printed
        return code, shown

    return call


#: Files of which each takes a minute or two; begun last they would be waited for alone.
LONGEST = (
    "test_pages_browser", "test_main_job", "test_docs_run", "test_connections", "test_compile",
    "test_compiled_run", "test_survival", "test_two_processes", "test_run_browser", "test_as_on_windows", "test_two_machines",
    "test_faults", "test_each_rank_loads_its_own_rows", "test_killed_sweep", "test_best_step",
)  # fmt: skip


@pytest.fixture(scope="session")
def kept_run(tmp_path_factory):
    """kept_run(folder, name="finished") -> a copy of a run; `finished` and `stopped` are trained once a session."""
    folder = of_all_processes(tmp_path_factory, "kept")

    def copy(into, name="finished"):
        with FileLock(folder / f"{name}.lock"):
            if not (folder / name / "exit").exists():
                command = [sys.executable, str(Path(__file__).parent / "kept_run.py"), str(folder / name / "run" / name)]
                (folder / name / "run").mkdir(parents=True, exist_ok=True)
                environment = {**os.environ, "FINETUNE_CACHE": str(folder / name / "cache")}
                ended = subprocess.run(command, capture_output=True, text=True, env=environment)
                assert ended.returncode == {"finished": 0, "stopped": 130}[name], ended.stdout[-2000:] + ended.stderr[-2000:]
                (folder / name / "exit").touch()
        return Path(shutil.copytree(folder / name / "run" / name, into / name))

    return copy


def pytest_itemcollected(item):
    if item.get_closest_marker("exhaustive"):
        item.add_marker("slow")  # `-m "not slow"` replaces the default `-m "not exhaustive"`


@pytest.hookimpl(trylast=True)  # when `-m` has left out what it leaves out
def pytest_collection_modifyitems(config, items):
    """Fast files first, then the longest; tests of a GPU are left out where there is none, real or stand-in.

    Files that fork a training come before those that run autograd themselves: a torch for CUDA can't fork after that.
    """
    has_stand_in = "STAND_IN_LIBRARIES" in os.environ  # set by `make test-card`
    has_gpu = has_stand_in or Path("/proc/driver/nvidia/version").exists()
    absent = [
        item
        for item in items
        if (item.get_closest_marker("gpu") and not has_gpu) or (item.get_closest_marker("standin") and not has_stand_in)
    ]
    if absent:
        config.hook.pytest_deselected(items=absent)
        items[:] = [item for item in items if item not in absent]
    forks = {item.path for item in items if {"train", "make_run"} & {*item.fixturenames}}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (item.path in slow, item.path not in forks, rank.get(item.path.stem, len(LONGEST))))


def has_compiler():
    return shutil.which("gcc") and shutil.which("g++") and Path(sysconfig.get_paths()["include"], "Python.h").exists()


def has_llama():
    checkout = os.environ.get("FINETUNE_LLAMA_CPP")
    return checkout and Path(checkout, "convert_hf_to_gguf.py").is_file() and find_spec("llama_cpp")


#: Markers of tests that are skipped in continuous integration, too: llama-cpp-python is built for an hour.
LEFT_OUT = ("llama",)
#: Markers of tests that need a program: its name, whether it is here, and how to get it.
PROGRAMS = {
    "browser": ("Chromium", lambda: shutil.which("chromium") or shutil.which("chromium-browser"), "apt-get install chromium"),
    "sandbox": ("bubblewrap", lambda: shutil.which("bwrap"), "apt-get install bubblewrap"),
    "npm": ("npm", lambda: shutil.which("npm"), "apt-get install npm"),
    "llama": ("llama.cpp", has_llama, "pip install '.[gguf]' and FINETUNE_LLAMA_CPP=CHECKOUT of llama.cpp"),
    "compiler": ("C++ compiler with Python's headers", has_compiler, "apt-get install g++ python3-dev"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Without its program a test is skipped, in continuous integration it fails: nobody would see there what is left out."""
    for marker, (name, is_here, how) in PROGRAMS.items():
        if item.get_closest_marker(marker) and not is_here():
            if os.environ.get("CI", "").lower() not in ("", "0", "false") and marker not in LEFT_OUT:
                pytest.fail(f"no {name}, and CI is set: {how}", pytrace=False)
            pytest.skip(f"no {name}; {how}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """How many tests were skipped for want of a program, a line for each program."""
    yield
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", []))
    for marker, (name, _, how) in PROGRAMS.items():
        if count := reasons[f"no {name}; {how}"]:
            terminalreporter.write_line(f"{count} {marker} tests skipped: no {name}; {how}")


def pytest_unconfigure():
    gc.freeze()


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory):
    """Path of a Python that starts with everything imported: commands that are not about starting need seconds less each."""
    folder = of_all_processes(tmp_path_factory, "warm")
    socket = folder / "socket"
    with FileLock(folder / "lock"):
        if not socket.exists():
            start_server(socket, os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid())
    os.environ["WARM_PYTHON"] = str(socket)
    return CLIENT
