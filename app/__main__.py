"""Web page, also `finetune ui`: `python -m app [--host 127.0.0.1] [--port 7860] [--runs runs]`"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from finetune.errors import FinetuneError
from finetune.system import keep_private, let_waiting_threads_sleep

from .web.server import serve


def main() -> int:
    """Serve; return the exit status."""
    keep_private()
    let_waiting_threads_sleep()
    parser = argparse.ArgumentParser(prog="finetune ui", description="Serve the web page and print its link, with the token.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; the token is always required")
    parser.add_argument("--port", type=int, default=7860, help="port; the next free one when it is taken; 0: any free port")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder with the runs")
    parser.add_argument("--allow-host", action="append", default=[], help="another host name that browsers use for this server")
    chosen = parser.parse_args()
    try:
        return serve(chosen.host, chosen.port, chosen.runs, tuple(chosen.allow_host))
    except FinetuneError as error:
        print("\n".join([error.title, *error.problems, error.fix]).strip(), file=sys.stderr)  # noqa: T201
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
