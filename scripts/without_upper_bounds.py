"""Removes the upper bounds from the installed finetune's requirements, and prints what is beyond them: `make test-edge`.

Run it only in an environment that is made for this: from then on no newer version is refused there.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distribution
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
_REQUIREMENT = re.compile(r"^Requires-Dist: [^;\n]+", re.MULTILINE)
_UPPER = re.compile(r",?<=?[\w.]+(?:(?<!,),(?=[>!=]))?")


def without_upper_bounds(text: str) -> str:
    """Package metadata whose requirements have no upper bounds."""
    return _REQUIREMENT.sub(lambda line: _UPPER.sub("", line[0]), text)


def main() -> int:
    """Rewrite the metadata of the installed package."""
    from finetune.requirements import DISTRIBUTION, packages

    beyond = [str(package) for package in packages() if package.installed and not package.fits]
    print("\n".join(beyond) or "every installed version is allowed")
    files = distribution(DISTRIBUTION).files or []
    metadata = Path(str(next(file for file in files if file.name == "METADATA").locate()))
    metadata.write_text(without_upper_bounds(metadata.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
