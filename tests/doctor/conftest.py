"""A hub on this machine."""

import http.server
import threading

import pytest


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
