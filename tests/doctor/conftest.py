"""A driver library to load where there is no card, and a hub on this machine."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory):
    """Folder of a libnvidia-ml.so.1 with a card whose state the environment sets."""
    folder = tmp_path_factory.mktemp("driver")
    command = ["gcc", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(HERE / "driver_library.c")]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def with_driver(driver_library):
    """with_driver("check_cards", CARD_FREE_GIB="2") -> the check's findings as JSON, in a process with that driver."""

    def run(check, **environment):
        code = (
            "import json, sys; from finetune.doctor import machine; found = getattr(machine, sys.argv[1])(); "
            "found = [found] if hasattr(found, 'check') else list(found); print(json.dumps([f.as_json() for f in found]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, check],
            env={**os.environ, "LD_LIBRARY_PATH": str(driver_library), **environment},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return json.loads(done.stdout)

    return run


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine: `hub.answers[path] = status`, `hub.asked` are (path, authorization)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            hub.asked.append((self.path, self.headers.get("Authorization")))
            self.send_response(hub.answers.get(self.path.split("?")[0], 404))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.answers, hub.asked = {"/api/models": 200, "/api/whoami-v2": 200}, []
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield hub
    hub.shutdown()
    hub.server_close()
