"""JSON output of commands, and how an error is printed."""

from __future__ import annotations

import json
import sys
from typing import Any

from finetune.errors import FinetuneError


def report(error: FinetuneError) -> int:
    """Print the problems and the fix. Returns the exit code."""
    if "--json" in sys.argv:
        print(json.dumps(error.as_json()))
        return error.exit_code
    from finetune.cli.render import print_error

    print_error(error)
    return error.exit_code


def print_json(values: Any) -> None:
    """One JSON document on standard output."""
    ascii_only = "utf" not in (sys.stdout.encoding or "").lower()  # what else would print is not JSON
    print(json.dumps(values, ensure_ascii=ascii_only, default=str))
