"""JSON output and errors."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from finetune.errors import FinetuneError

#: Control and bidirectional characters that `json.dumps` leaves.
_ACTING = re.compile(r"[\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def report(error: FinetuneError) -> int:
    """Print an error, and return its exit code."""
    if "--json" in sys.argv:  # not an option: wrong usage ends before options are parsed
        print(json.dumps(error.as_json()))
        return error.exit_code
    from finetune.cli.render import print_error  # imports rich, which JSON doesn't need

    print_error(error)
    return error.exit_code


def print_json(values: Any) -> None:
    """Print a JSON document."""
    ascii_only = "utf" not in (sys.stdout.encoding or "").lower()  # other encodings would print \x escapes, which JSON lacks
    text = json.dumps(values, ensure_ascii=ascii_only, default=str)
    print(text if text.isprintable() else _ACTING.sub(lambda match: f"\\u{ord(match[0]):04x}", text))
