"""The wheel, installed into an environment with nothing else of the project: commands, recipes, bundled model and page work.

The environment takes its libraries from the one that runs the tests, by a path that holds no trace of the checkout.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "pyproject.toml", "setup.py", "README.md", "LICENSE", "finetune", "app", "recipes",
    "package.json", "package-lock.json", ".npmrc", "scripts/browser_files.py",
)  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy so that nothing of an earlier build gets in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PARTS:
        part = ROOT / name
        if part.is_dir():
            shutil.copytree(part, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (source / name).parent.mkdir(exist_ok=True)
            shutil.copy(part, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The `finetune` command of an environment with the wheel, beside another project's package called `app`."""
    venv = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, capture_output=True)
    command = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (packages / "app").mkdir()
    for name in ("__init__", "__main__", "report"):
        (packages / "app" / f"{name}.py").write_text("print('a package of another project')\n")
    return venv / "bin" / "finetune"


@pytest.fixture(autouse=True)
def no_checkout(monkeypatch):
    """A PYTHONPATH that the tests themselves need would lead to the checkout."""
    monkeypatch.delenv("PYTHONPATH", raising=False)


def run(command, folder, *arguments, **options):
    return subprocess.run([str(command), *arguments], cwd=folder, capture_output=True, text=True, **options)


def test_the_wheel_holds_app_recipes_and_bundled_model_in_one_top_level_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {f"finetune/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert recipes <= names
    assert {
        "finetune/py.typed",
        "finetune/app/theme.css",
        "finetune/app/page.js",
        "finetune/app/chart.js",
        "finetune/bundled/tiny-base/model.safetensors",
    } <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "recipes/")) or ".env" in name]
    modules = {f"finetune/{path.relative_to(base)}" for base in (ROOT, ROOT / "finetune") for path in base.glob("app/**/*.py")}
    modules |= {str(path.relative_to(ROOT)) for path in ROOT.glob("finetune/**/*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    archive = zipfile.ZipFile(wheel)
    (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
    installed = {line.partition("/")[0] for line in archive.read(record).decode().splitlines()}
    assert installed == {"finetune", record.partition("/")[0]}


def test_everything_is_imported_from_the_environment_and_another_package_called_app_stays_what_it_is(installed, tmp_path):
    process = run(installed.with_name("python"), tmp_path, "-c", "import finetune.app; print(finetune.app.__file__)")
    assert process.stdout.startswith(str(installed.parents[1])), process.stdout + process.stderr
    python = installed.with_name("python")
    assert run(python, tmp_path, "-m", "app").stdout == "a package of another project\n" * 2
    code = "from finetune.cli.ui import page_command; print(*page_command('.report')[1:])"
    assert run(python, tmp_path, "-c", code).stdout == "-P -m finetune.app.report\n"


def test_help_version_and_recipes(installed, tmp_path):
    assert "Fine-tune" in run(installed, tmp_path, "--help").stdout
    version = run(installed, tmp_path, "--version").stdout
    assert version.startswith("finetune ") and "torch " in version and "bitsandbytes " in version
    listed = json.loads(run(installed, tmp_path, "recipes", "--json").stdout)
    assert {row["name"] for row in listed} == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}


def test_a_run_finds_the_recipe_in_the_package(installed, tmp_path):
    short = ["max_steps=2", "dataset.max_rows=32", "eval_steps=0", "output_dir=runs/first"]
    process = run(installed, tmp_path, "run", "recipes/tiny-cpu.yaml", *short)
    assert process.returncode == 0, process.stdout + process.stderr
    assert (tmp_path / "runs" / "first" / "adapter" / "adapter_model.safetensors").is_file()


def test_the_page_answers_and_ends(installed, tmp_path):
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    page = subprocess.Popen(
        [str(installed), "ui", "--port", "0"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        link = next(word for line in page.stdout for word in line.split() if word.startswith("http://127.0.0.1:"))
        address = link.split("/?")[0].rstrip("/")
        with urllib.request.urlopen(f"{address}/healthz", timeout=300) as answer:
            assert answer.status == 200
        page.send_signal(signal.SIGTERM)
        page.wait()
    finally:
        if page.poll() is None:
            os.killpg(page.pid, signal.SIGKILL)
            page.wait()
