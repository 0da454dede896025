"""What runs inside the container: the entry point with signals, input and exit status, the health check, and what gets in."""

import functools
import http.server
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINT = ROOT / "docker" / "entrypoint.sh"
FINETUNE = """#!/bin/sh
echo "$@" >> calls
[ "$1" = pause ] && { [ -e run.pid ] && kill -USR1 "$(cat run.pid)"; exit 0; }
[ "$1" = echo ] && { cat; exit 7; }
trap 'trap "" TERM; echo asked >> calls; exit 143' USR1
trap 'echo term >> calls; exit 0' TERM
[ "$1" = run ] && echo $$ > run.pid
touch ready
while :; do sleep 0.05; done
"""


@pytest.fixture
def container(tmp_path):
    """start(*arguments) -> the entry point at work, with a `finetune` that writes down how it is called."""
    command = tmp_path / "bin" / "finetune"
    command.parent.mkdir()
    command.write_text(FINETUNE)
    command.chmod(0o755)
    started = []

    def start(*arguments, **options):
        environment = {**os.environ, "PATH": f"{command.parent}:/usr/bin:/bin"}
        # tests that run in the background of a shell inherit that Ctrl-C is ignored, and a shell can't trap what it ignored
        heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(
            ["sh", str(ENTRYPOINT), *arguments], cwd=tmp_path, env=environment, preexec_fn=heard, **options
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_until_ready(folder):
    while not (folder / "ready").exists():
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_stops_the_runs_first_and_the_run_decides_the_exit_status(container, tmp_path, number):
    process = container("run", "tiny-cpu", stderr=subprocess.DEVNULL)
    wait_until_ready(tmp_path)
    process.send_signal(number)
    assert process.wait() == 143
    assert (tmp_path / "calls").read_text().splitlines()[:3] == ["run tiny-cpu", "pause --all", "asked"]


def test_the_page_is_ended_after_the_runs_have_stopped(container, tmp_path):
    process = container("ui", "--host", "0.0.0.0", stderr=subprocess.DEVNULL)
    wait_until_ready(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert (tmp_path / "calls").read_text().splitlines() == ["ui --host 0.0.0.0", "pause --all", "term"]


def test_input_and_exit_status_pass_through(container):
    process = container("echo", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.communicate("a question\n")[0] == "a question\n"
    assert process.returncode == 7


def healthcheck():
    specification = importlib.util.spec_from_file_location("healthcheck", ROOT / "docker" / "healthcheck.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("status", "well"), [(200, True), (500, False), (401, False)])
def test_the_page_is_well_when_it_answers_with_success(status, well):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert healthcheck().page_answers(f"http://127.0.0.1:{server.server_port}/healthz") is well
    server.shutdown()
    server.server_close()
    assert healthcheck().page_answers(f"http://127.0.0.1:{server.server_port}/healthz") is False


def test_a_page_at_work_is_recognised():
    page = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "-m", "finetune.app"])
    try:
        while b"finetune.app" not in Path(f"/proc/{page.pid}/cmdline").read_bytes():  # a fork, until it is the new program
            time.sleep(0.02)
        assert healthcheck().page_is_run()
    finally:
        page.kill()
        page.wait()


def test_nothing_gets_into_the_image_that_is_not_listed():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    only_in_part = {line.removesuffix("/*") for line in lines if line.endswith("/*")}
    allowed = {line[1:] for line in lines if line.startswith("!")} - only_in_part
    copied = set()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from=" not in line:
            sources = [word for word in line.split()[1:-1] if not word.startswith("--")]
            copied |= {word if word.split("/")[0] in only_in_part else word.split("/")[0] for word in sources}
    assert copied == allowed


def test_the_composition_is_for_this_machine_only_waits_for_a_checkpoint_and_the_versions_name_torch():
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["finetune"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["stop_grace_period"] == "5m" and service["cap_drop"] == ["ALL"]
    assert service["environment"] == {"HF_TOKEN": None, "FINETUNE_UI_TOKEN": None}  # passed through, never a value
    declared = set(re.search(r"VOLUME \[(.*)\]", (ROOT / "Dockerfile").read_text())[1].replace('"', "").split(", "))
    assert declared <= {volume.split(":")[1] for volume in service["volumes"]}
    constraints = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^torch==\d+\.\d+\.\d+$", constraints, re.M)  # the Dockerfile reads it to choose the processor's wheel
