"""`finetune ui`: replace this process by the web page's."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from finetune.errors import PackagesError
from finetune.system import exec_command


def start_page(*, host: str, port: int, runs: str, allow_host: list[str]) -> int:
    """Become `python -m app`. `-P` prevents importing a folder named app in the working directory."""
    if find_spec("gradio") is None:
        raise PackagesError("the page needs gradio, which is not installed", 'Install it: pip install "gradio>=6.24,<7"')
    command = [sys.executable, "-P", "-m", "app", "--host", host, "--port", str(port), "--runs", runs]
    for name in allow_host:
        command += ["--allow-host", name]
    return exec_command(command)
