"""Server: FastAPI with Gradio behind the guard."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import tempfile
import warnings
from pathlib import Path
from typing import Any

from finetune.errors import CommandError
from finetune.system import SETTINGS, port_socket

from ..workspace import Workspace
from .guard import LOOPBACK, UPLOAD_BYTES, Access, Guard, PageFilter, UploadLimit

_LEAST_TOKEN_LENGTH = 16
#: More connections get 503, before file descriptors run out.
_MOST_CONNECTIONS = 512
ANY_HOST = ("0.0.0.0", "::")  # all addresses of this machine


def page_token() -> str:
    """Return FINETUNE_UI_TOKEN or a random token. Raises CommandError."""
    token = os.environ.get("FINETUNE_UI_TOKEN")
    if token is None:
        return secrets.token_urlsafe(32)
    # letters that a header, a cookie and a link can carry
    if len(token) < _LEAST_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or set(token) & set(' ;,"\\'):
        fix = 'Unset FINETUNE_UI_TOKEN for a random one, or: export FINETUNE_UI_TOKEN="$(openssl rand -hex 32)"'
        raise CommandError(f"the token must have at least {_LEAST_TOKEN_LENGTH} letters and digits", fix)
    return token


def listen(host: str, port: int) -> socket.socket:
    """Return a socket at `port` or one of the next twenty; 0: any. Raises CommandError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, port + 20) if port else [0]:
        listener = port_socket(family)
        try:
            listener.bind((host, candidate))
        except OSError as error:
            listener.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # the port is taken, or privileged
                raise CommandError(f"can't listen on {host}: {error.strerror}", "Use --host 127.0.0.1.") from None
            continue
        return listener
    raise CommandError(f"ports {port} to {port + 19} are taken", "Choose another: finetune ui --port 8000")


def make_access(host: str, port: int, token: str, allowed_hosts: tuple[str, ...] = ()) -> Access:
    """Return access by loopback, listening and allowed host names."""
    names = [*LOOPBACK, *(name.lower() for name in allowed_hosts)]
    is_any_host = host in ANY_HOST
    if not is_any_host:
        names.append(f"[{host}]" if ":" in host else host.lower())
    return Access(token, port, tuple(dict.fromkeys(names)), any_port=is_any_host)


def build(workspace: Workspace, access: Access) -> tuple[Any, Any]:
    """Return the guarded application and its context, which the caller closes."""
    temporary = Path(tempfile.mkdtemp(prefix="finetune-ui-"))  # mode 0700
    os.environ.update(
        GRADIO_ANALYTICS_ENABLED="False", GRADIO_TEMP_DIR=str(temporary / "files"), GRADIO_SSR_MODE="False", **SETTINGS,
    )  # fmt: skip
    (temporary / "files").mkdir(mode=0o700)
    (temporary / "empty").mkdir(mode=0o700)
    os.chdir(temporary / "empty")  # Gradio would serve files of the working directory
    warnings.filterwarnings("ignore", message="SSR mode is not supported")  # SSR is off
    import gradio
    from fastapi import FastAPI
    from fastapi.middleware.gzip import GZipMiddleware

    from ..page import build_page, complete
    from ..web.followed import Context, explain_errors

    context = Context(workspace, temporary)
    api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    explain_errors(api)
    api.get("/healthz")(lambda: {"ok": True})
    page, mount_options = build_page(context, api)
    api = gradio.mount_gradio_app(
        api, page, path="/", ssr_mode=False, max_file_size=UPLOAD_BYTES, footer_links=[], allowed_paths=[],
        show_error=True, enable_monitoring=False, pwa=False, mcp_server=False, **mount_options,
    )  # fmt: skip
    return Guard(UploadLimit(GZipMiddleware(PageFilter(api, complete)), temporary / "files"), access), context


def serve(host: str, port: int, runs: Path, allowed_hosts: tuple[str, ...] = ()) -> int:
    """Serve until Ctrl-C; runs continue."""
    import uvicorn

    token = page_token()
    bound = listen(host, port)
    port = bound.getsockname()[1]
    workspace = Workspace(Path.cwd(), runs.absolute())
    application, context = build(workspace, make_access(host, port, token, allowed_hosts))
    link_host = "127.0.0.1" if host in ANY_HOST else f"[{host}]" if ":" in host else host
    bound.listen()  # the link works when it is printed: connections wait for the server
    print(f"finetune ui: http://{link_host}:{port}/?token={token}", flush=True)  # noqa: T201
    print(f"Runs: {workspace.runs}   Ctrl-C ends the page; runs continue.", flush=True)  # noqa: T201
    config = uvicorn.Config(
        application, http="h11", log_level="warning", access_log=False, server_header=False, proxy_headers=False, ws="none",
        timeout_graceful_shutdown=2, limit_concurrency=_MOST_CONNECTIONS,
    )  # fmt: skip
    with contextlib.closing(context), contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[bound])
    return 0
