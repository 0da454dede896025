"""What goes out: every connection of each command, with a stand-in for the hub that counts what it is asked."""

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from finetune.bundled import model_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
#: Writes down where any process connects, and which names it looks up.
RECORDER = """
import os, sys
def record(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        target = "%s:%s" % arguments[1][:2]
    elif event == "socket.getaddrinfo" and arguments[0]:
        target = "%s:%s" % arguments[:2]
    else:
        return
    with open(os.environ["CONNECTIONS"], "a") as file:
        file.write(target + "\\n")
sys.addaudithook(record)
"""
SHORT = (
    "max_steps=2", "save_steps=0", "eval_steps=1", "dataset.max_rows=16", "sample_answers=1", "effective_batch_size=8",
    "output_dir=run",
)  # fmt: skip


class StandInHub(BaseHTTPRequestHandler):
    """Has the bundled model as owner/name; `asked` has each request with the client's name."""

    asked: list[str] = []

    def do_GET(self):
        self.asked.append(f"{self.path} {self.headers.get('User-Agent')}")
        file = model_path("tiny") / self.path.rpartition("/")[2]
        exists = self.path.startswith("/owner/name/resolve/") and file.is_file()
        body = file.read_bytes() if exists else b"{}"
        self.send_response(200 if exists else 404)
        headers = {"X-Repo-Commit": "a" * 40, "Content-Length": str(len(body))}
        headers |= {"ETag": f'"{file.name}"'} if exists else {"X-Error-Code": "EntryNotFound"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_POST = do_GET

    def log_message(self, *_):
        """Nothing into the test's output."""


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandInHub)
    StandInHub.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture
def start(hub, tmp_path, monkeypatch):
    """start(*arguments) -> the running command; its connections are in `start.connections()`."""
    (tmp_path / "recorder").mkdir()
    (tmp_path / "recorder" / "sitecustomize.py").write_text(RECORDER)
    record = tmp_path / "connections"
    switches = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK", "TRANSFORMERS_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in switches}
    environment |= {
        "CONNECTIONS": str(record), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "hf"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "recorder"), *sys.path]),
    }  # fmt: skip

    def command(*arguments):
        return subprocess.Popen(
            [sys.executable, "-m", "finetune", *arguments], env=environment, cwd=tmp_path, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    command.connections = lambda: record.read_text().split() if record.exists() else []
    return command


def finish(process, text="", code=0):
    out, errors = process.communicate(text)
    assert process.returncode == code, out + errors
    return out


def test_with_a_model_on_this_disk_no_command_connects_to_anything(start, hub):
    finish(start("run", "tiny-cpu", *SHORT))
    finish(start("eval", "run", "--rows", "2"))
    finish(start("chat", "run"), "Where is my parcel?\n")
    assert start.connections() == [] and StandInHub.asked == []


def test_the_page_connects_only_to_its_own_machine_and_never_to_the_hub(start, hub):
    page = start("ui", "--port", "0")
    link = next(word for line in page.stdout for word in line.split() if word.startswith("http://127.0.0.1"))
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    assert browser.open(link, timeout=120).status == 200
    page.send_signal(signal.SIGINT)
    page.communicate()
    assert {address.split(":")[0] for address in start.connections()} <= {"127.0.0.1", "localhost"}
    assert StandInHub.asked == []


def test_doctor_asks_the_hub_only_whether_it_answers(start, hub):
    process = start("doctor", "tiny-cpu", "--json")
    process.communicate()
    assert set(start.connections()) <= {f"127.0.0.1:{hub.server_port}"}
    assert len(StandInHub.asked) <= 2 and not any("session_id" in line for line in StandInHub.asked)


def test_a_model_of_the_hub_is_asked_for_by_name_and_without_telemetry(start, hub):
    process = start("plan", "owner/name", "--data", "support", "--gpu", "rtx-4090")
    process.communicate()
    assert StandInHub.asked and {address.rpartition(":")[0] for address in start.connections()} == {"127.0.0.1"}
    for line in StandInHub.asked:
        path, _, client = line.partition(" ")
        assert (path == "/" or "owner/name" in path) and "session_id" not in client and "/telemetry" not in path, line
