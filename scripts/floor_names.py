"""Writes tests/compat/floor_names.json: the parameters, in the lowest supported versions, of the names that this project uses.

Run it with constraints-lowest.txt installed, as `make test-lowest` does. Maps a name to its parameters; null if it takes any
keyword or the parameters can't be read. Missing names are left out, and `tests/compat` fails for them.
"""

import inspect
import json
import sys
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "compat")]


def parameters(value: Any) -> list[str] | None:
    """Names of the parameters that can be passed by keyword, or None."""
    try:
        signature_parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature_parameters):
        return None
    return sorted(parameter.name for parameter in signature_parameters if parameter.kind is not parameter.POSITIONAL_ONLY)


def main() -> int:
    """Write the file, and print missing names."""
    from used_names import LIBRARIES, used

    parameters_by_name: dict[str, list[str] | None] = {}
    for name in sorted(used()):
        try:
            value = resolve_name(name)
        except (AttributeError, ImportError) as error:
            print(f"{name}: {error}")
            continue
        parameters_by_name[name] = parameters(value)
    versions = {name: version(name).partition("+")[0] for name in sorted(LIBRARIES)}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in parameters_by_name.items())
    text = f'{{\n "versions": {json.dumps(versions)},\n "names": {{\n{lines}\n }}\n}}\n'
    (ROOT / "tests" / "compat" / "floor_names.json").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
