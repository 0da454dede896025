"""The hub: can it be reached, and is the login good? No token is ever shown, sent elsewhere or written."""

from __future__ import annotations

import os
import ssl
import time
import urllib.error
import urllib.request

from finetune.doctor.finding import Finding
from finetune.hub import is_switched_off

#: Seconds to wait for the hub; the rest of the report doesn't wait.
TIMEOUT_S = 4.0
_OFFLINE_FIX = "Models and data that are in the cache, or in local folders, work without it: finetune doctor RECIPE says which."


def check_hub() -> Finding:
    """One small request to the hub's address, which HF_ENDPOINT can change."""
    from huggingface_hub import constants

    if is_switched_off():
        return Finding("hub", "skip", "switched off (HF_HUB_OFFLINE)", "unset HF_HUB_OFFLINE to download models and data")
    began = time.monotonic()
    status, problem = _get(f"{constants.ENDPOINT}/api/models?limit=1")
    place = _host(constants.ENDPOINT)
    if status is None:
        return Finding("hub", "warn", f"{place} can't be reached: {problem}", f"Check network and proxy. {_OFFLINE_FIX}")
    if status >= 400:
        return Finding("hub", "warn", f"{place} answers with status {status}", f"Try again later. {_OFFLINE_FIX}")
    answered_s = round(time.monotonic() - began, 3)
    return Finding("hub", "ok", f"{place} answers in {answered_s * 1000:.0f} ms", facts={"answered_s": answered_s})


def check_login() -> Finding:
    """Is there a token, and does the hub take it?"""
    from huggingface_hub import constants, get_token

    token = get_token()
    if token is None:
        return Finding("hub login", "skip", "not logged in; only gated and private models need it", "hf auth login")
    source = "HF_TOKEN" if os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") else "hf auth login"
    if is_switched_off():
        return Finding("hub login", "skip", f"a token from {source}; not tried, the hub is switched off")
    status, problem = _get(f"{constants.ENDPOINT}/api/whoami-v2", token)
    if status == 200:
        return Finding("hub login", "ok", f"the hub takes the token from {source}")
    if status in (401, 403):
        fix = "Make a new token at https://huggingface.co/settings/tokens, then: hf auth login"
        return Finding("hub login", "fail", f"the hub refuses the token from {source} (status {status})", fix)
    said = problem or f"status {status}"
    return Finding("hub login", "warn", f"a token from {source}; could not be tried: {said}", "See the line `hub`.")


def _get(address: str, token: str | None = None) -> tuple[int | None, str]:
    """Status of a GET, or None and why there was none. One attempt; the token doesn't follow redirects."""
    request = urllib.request.Request(address, headers={"User-Agent": "finetune-doctor"})
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, ""
    except OSError as error:
        return _failed(error)
    except ValueError:  # a line break in the token or address; the error's text would show it
        return None, "the token or HF_ENDPOINT has characters that a request can't carry"


def _failed(error: OSError) -> tuple[int | None, str]:
    if isinstance(error, urllib.error.HTTPError):
        return error.code, ""
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return None, f"no answer within {TIMEOUT_S:g} s"
    if isinstance(reason, ssl.SSLError):
        return None, f"TLS: {reason.reason or reason}; a company's proxy? set SSL_CERT_FILE to its certificate"
    return None, str(getattr(reason, "strerror", None) or reason)


def _host(endpoint: str) -> str:
    """The address without a user name or password that may stand in it."""
    return endpoint.rpartition("@")[2].removeprefix("https://")
