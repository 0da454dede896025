"""A stand-in for the hub: it answers huggingface_hub's requests of an upload, from repository to commit. Not a test."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: Token -> status of a request with it.
TOKENS = {"Bearer hf_writes": 200, "Bearer hf_reads": 403}


class Hub:
    """Repositories by name, as {"private": bool, "commits": [{path: content}]}. `before(number)` is called for each request."""

    def __init__(self):
        self.repos, self.objects, self.requests = {}, {}, []
        self.before = lambda number: None

    def files(self, repo):
        """All files of a repository after its commits."""
        return {path: content for commit in self.repos[repo]["commits"] for path, content in commit.items()}

    def answer(self, method, path, body):
        """Status and JSON of the answer to a request that is allowed."""
        if path == "/api/repos/create":
            request = json.loads(body)
            repo = f"{request['organization']}/{request['name']}"
            if repo in self.repos:
                return 409, {"error": "You already created this model repo"}
            self.repos[repo] = {"private": request.get("visibility") == "private", "commits": []}
            return 200, {"url": f"{self.url}/{repo}", "id": repo}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.startswith("/lfs/") and method == "PUT":
            assert hashlib.sha256(body).hexdigest() == path[5:]
            self.objects[path[5:]] = body
            return 200, {}
        if path == "/verify":
            return (200 if json.loads(body)["oid"] in self.objects else 404), {}
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [self._upload(upload) for upload in json.loads(body)["objects"]]
            return 200, {"transfer": "basic", "objects": objects}
        repo = "/".join(path.split("/")[3:5])
        if repo not in self.repos:
            return 404, {"error": "Repository not found"}
        if path == f"/api/models/{repo}":
            siblings = [{"rfilename": name} for name in [".gitattributes", *self.files(repo)]]
            return 200, {"id": repo, "private": self.repos[repo]["private"], "siblings": siblings}
        if path == f"/api/models/{repo}/preupload/main":
            return 200, {"files": [{"path": file["path"], "shouldIgnore": False,
                                    "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".gguf")) else "regular"}
                                   for file in json.loads(body)["files"]]}  # fmt: skip
        if path == f"/api/models/{repo}/commit/main":
            self.repos[repo]["commits"].append(dict(filter(None, map(self._file, body.splitlines()))))
            return 200, {"commitUrl": f"{self.url}/{repo}/commit/{len(self.repos[repo]['commits'])}", "commitOid": "0" * 40}
        return 404, {"error": "Not found"}

    def _upload(self, upload):
        actions = {"upload": {"href": f"{self.url}/lfs/{upload['oid']}"}, "verify": {"href": f"{self.url}/verify"}}
        return {**upload, **({} if upload["oid"] in self.objects else {"actions": actions})}

    def _file(self, line):
        item = json.loads(line)
        if item["key"] == "file":
            return item["value"]["path"], base64.b64decode(item["value"]["content"])
        return (item["value"]["path"], self.objects[item["value"]["oid"]]) if item["key"] == "lfsFile" else None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_any(self):
        hub = self.server.hub
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path.partition("?")[0]
        hub.requests.append(f"{self.command} {path}")
        if hub.before(len(hub.requests)):
            self.close_connection = True  # as when the network goes down: no answer
            return
        status = 200 if path.startswith("/lfs/") else TOKENS.get(self.headers.get("authorization"), 401)
        status, values = hub.answer(self.command, path, body) if status == 200 else (status, {"error": "refused"})
        content = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_HEAD = handle_any

    def log_message(self, *_):
        pass


@contextmanager
def hub_stand_in():
    """The hub, at its `url`, for the block."""
    server, hub = ThreadingHTTPServer(("127.0.0.1", 0), Handler), Hub()
    server.hub, server.daemon_threads, hub.url = hub, True, f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
