"""`finetune ui`: replace this process by the web page's."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from finetune.requirements import refuse_missing_extra
from finetune.system import exec_command


def page_command(module: str = "") -> list[str]:
    """The command line of the page, or of its `module`, such as ".report".

    An installed page is `finetune.app`; a checkout's is `app`, a folder of its own (setup.py). `-P`: a folder named app in the
    working directory is neither.
    """
    package = "finetune.app" if find_spec("finetune.app") else "app"
    return [sys.executable, "-P", "-m", f"{package}{module}"]


def start_page(*, host: str, port: int, runs: str, allow_host: list[str]) -> int:
    """Become the page's process."""
    refuse_missing_extra("ui", "the page")
    command = [*page_command(), "--host", host, "--port", str(port), "--runs", runs]
    for name in allow_host:
        command += ["--allow-host", name]
    return exec_command(command)
