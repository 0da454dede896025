"""Check whether the hub is reachable."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

from finetune.compat.hub import set_offline
from finetune.errors import CommandError

_TIMEOUT_S = 3.0  # the libraries would retry for most of a minute without a network
VALID_S = 60.0  # seconds for which the result of a check is used

_NAME = r"[A-Za-z0-9][\w.-]*"
#: OWNER/NAME; ids of the first models and datasets have no owner.
REPO_ID, HUB_ID = re.compile(f"{_NAME}/{_NAME}"), re.compile(f"{_NAME}(/{_NAME})?")
_lock = threading.Lock()
_checked_s: float | None = None  # time of the last check
_is_unreachable = False


def require_repo_id(repo: str) -> None:
    """Raise CommandError unless `repo` is OWNER/NAME."""
    if not REPO_ID.fullmatch(repo):
        raise CommandError(f"{repo[:100]!r} is not OWNER/NAME", "For example alice/support-lora")


def cached_file(repo: str, name: str, revision: str | None) -> Path | None:
    """Return a file's path in the hub's cache, or None."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repo, name, revision=revision)
    return Path(path) if isinstance(path, str) else None


def is_switched_off() -> bool:
    """Return whether the user has disabled the hub."""
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE") == "1"
    return bool(offline) and not _is_unreachable  # `is_reachable` sets the same constant


def is_reachable() -> bool:
    """Return whether the hub answers; if not, set the libraries offline."""
    global _checked_s, _is_unreachable
    from huggingface_hub import constants

    if is_switched_off():
        return False
    with _lock:
        if _checked_s is None or time.monotonic() - _checked_s > VALID_S:
            _is_unreachable = not _answers(constants.ENDPOINT)
            set_offline(_is_unreachable)
            _checked_s = time.monotonic()
    return not _is_unreachable


def _answers(address: str) -> bool:
    import urllib.error  # slow to import, and most commands do not ask the hub
    import urllib.request

    answered: list[bool] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_TIMEOUT_S).close()
        except urllib.error.HTTPError:  # an error status is an answer, too
            pass
        except (OSError, ValueError):
            return
        answered.append(True)

    asking = threading.Thread(target=ask, daemon=True)  # a thread: DNS lookups have no timeout
    asking.start()
    asking.join(_TIMEOUT_S)
    return bool(answered)
