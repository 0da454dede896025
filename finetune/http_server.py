"""Shared by the page's server and the endpoint: the token, the host in a link, and serving until Ctrl-C."""

from __future__ import annotations

import contextlib
import secrets
import socket
from typing import Any

from finetune.errors import CommandError

_LEAST_TOKEN = 16
_REQUEST_HEAD_S = 10.0
#: More are answered with 503, before the process runs out of file descriptors.
_MOST_CONNECTIONS = 512
#: Every address of this machine.
ANY_HOST = ("0.0.0.0", "::")


def choose_token(token: str | None, fix: str) -> str:
    """The given token, or a new random one. Raises CommandError for a short one, or one that a header or link can't have."""
    if token is None:
        return secrets.token_urlsafe(32)
    if len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable() or set(token) & set(' ;,"\\'):
        raise CommandError(f"the token must have at least {_LEAST_TOKEN} letters and digits", fix)
    return token


def host_in_url(host: str) -> str:
    """The host of a listening address as links on this machine write it."""
    return "127.0.0.1" if host in ANY_HOST else f"[{host}]" if ":" in host else host


def serve_until_interrupted(application: Any, bound: socket.socket) -> None:
    """Serve an ASGI application at a bound socket until Ctrl-C."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class ImpatientProtocol(H11Protocol):
        """Closes a connection that has sent no complete request head in time, also after its first request."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(_REQUEST_HEAD_S, self.close_if_silent, True, None)

        def close_if_silent(self, was_idle: bool, earlier_request: Any) -> None:
            if self.transport.is_closing():
                return
            is_idle = self.cycle is None or self.cycle.response_complete
            if is_idle and was_idle and self.cycle is earlier_request:
                self.transport.close()
            else:
                self.loop.call_later(_REQUEST_HEAD_S, self.close_if_silent, is_idle, self.cycle)

    config = uvicorn.Config(
        application, http=ImpatientProtocol, log_level="warning", access_log=False, server_header=False, proxy_headers=False,
        ws="none", timeout_graceful_shutdown=2, limit_concurrency=_MOST_CONNECTIONS,
    )  # fmt: skip
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[bound])
