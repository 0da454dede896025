"""Versions, hashes and licences of all installed packages.

    python scripts/dependencies.py hashes   # writes requirements-hashed.txt from constraints.txt; needs uv and an index
    python scripts/dependencies.py check    # compares versions with constraints.txt; checks licences of installed packages
    python scripts/dependencies.py sbom     # writes the packages as a CycloneDX list to dist/, beside the wheel

`pip install --require-hashes -r requirements-hashed.txt`, then `pip install --no-deps .` installs only the files that existed
when it was written.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HASHED, CONSTRAINTS = ROOT / "requirements-hashed.txt", ROOT / "constraints.txt"
EXTRAS = ("ui", "sweep", "hybrid")
PROJECT = "finetune-forecast"
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
#: Licences that let this project be used and passed on as Apache-2.0 does; MPL-2.0 is about changes to the library itself.
_ALLOWED = re.compile(
    r"\b(MIT(-CMU)?|Apache|BSD|[023]-Clause|0BSD|ISC|PSF|Python Software Foundation|MPL-2\.0|Mozilla Public License 2\.0|Zlib|"
    r"CC0|BSL-1\.0|CNRI-Python|Unlicense|DFSG approved|LLVM-exception)\b"
)
#: What torch's CUDA wheel needs: NVIDIA's own terms, which the wheels call "Other/Proprietary License" or nothing at all.
_OF_CUDA = re.compile(r"(nvidia|cuda)-")


def main() -> int:
    """Run a command; returns 1 if there are problems."""
    command = {"hashes": write_hashes, "check": check, "sbom": write_sbom}.get(" ".join(sys.argv[1:]))
    if command is None:
        print(__doc__)
        return 2
    problems = command()
    print(*problems, sep="\n", end="\n" if problems else "")
    return bool(problems)


def write_hashes() -> list[str]:
    """Write the hashes of every file of each version, for all platforms."""
    extras = [part for extra in EXTRAS for part in ("--extra", extra)]
    options = ["--generate-hashes", "--universal", "--no-header", "--no-annotate", "--python-version", "3.11"]
    command = ["uv", "pip", "compile", "-q", *options, *extras, "-c", str(CONSTRAINTS), "pyproject.toml"]
    try:
        text = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    except FileNotFoundError:
        return ["uv is missing: pip install uv"]
    except subprocess.CalledProcessError as error:
        return [f"uv ended with {error.returncode}"]
    head = f"# Made by scripts/dependencies.py: pip install --require-hashes -r {HASHED.name}\n"
    HASHED.write_text(head + text, encoding="utf-8")
    return []


def check() -> list[str]:
    """Return pins that differ from constraints.txt or have no hash, and libraries without an allowed licence."""
    expected, problems = dict(pins(CONSTRAINTS.read_text(encoding="utf-8"))), []
    for name, (version, hashes) in hashed_pins().items():
        if expected.get(name, version) != version:
            problems.append(f"{HASHED.name} has {name} {version}, {CONSTRAINTS.name} {expected[name]}")
        if not hashes:
            problems.append(f"{HASHED.name} has no hash of {name}")
        licence = licence_of(name)
        if licence is not None and not is_allowed(licence, name):
            problems.append(f"{name} has the licence {licence!r}, which scripts/dependencies.py does not allow")
    return problems


def write_sbom() -> list[str]:
    """Write the list of components beside the wheel, in CycloneDX 1.6."""
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if not wheels:
        return ["dist/ has no wheel: make wheel"]
    components = json.dumps(sbom(wheels[-1].name.split("-")[1]), indent=1)
    wheels[-1].with_suffix(".cdx.json").write_text(components + "\n", encoding="utf-8")
    return []


def sbom(version: str) -> dict[str, Any]:
    """The components with version, hashes of their files, and licence where they are installed."""
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {"component": _component(PROJECT, version) | {"type": "application"}},
        "components": [_component(name, pin, hashes) for name, (pin, hashes) in hashed_pins().items()],
    }  # fmt: skip


def _component(name: str, version: str, hashes: tuple[str, ...] = ()) -> dict[str, Any]:
    url = f"pkg:pypi/{name}@{version}"
    component: dict[str, Any] = {"type": "library", "name": name, "version": version, "purl": url}
    if licence := licence_of(name):
        component["licenses"] = [{"license": {"name": licence}}]
    if hashes:
        digests = [[{"alg": "SHA-256", "content": value}] for value in hashes]
        component["externalReferences"] = [{"type": "distribution", "url": url, "hashes": digest} for digest in digests]
    return component


def pins(text: str) -> list[tuple[str, str]]:
    """Normalised name and version of each pin."""
    return [(_normalised(name), version) for name, version in _PIN.findall(text)]


def hashed_pins() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Version and hashes by name."""
    blocks = re.split(r"\n(?=[A-Za-z0-9])", HASHED.read_text(encoding="utf-8"))
    return {name: (version, tuple(_HASH.findall(block))) for block in blocks for name, version in pins(block)}


def licence_of(name: str) -> str | None:
    """The licence in an installed library's metadata; None where it is not installed."""
    try:
        metadata = distribution(name).metadata
    except PackageNotFoundError:
        return None
    classifiers = [line.split(" :: ")[-1] for line in metadata.get_all("Classifier") or [] if line.startswith("License ::")]
    texts = [metadata.get("License-Expression"), *classifiers, (metadata.get("License") or "").strip().split("\n")[0]]
    return next((text for text in texts if text and text != "OSI Approved"), "")


def is_allowed(licence: str, name: str = "") -> bool:
    """Return whether every licence, or one of the alternatives, is allowed. CUDA's libraries are allowed by name."""
    if _OF_CUDA.match(name):
        return True
    terms = re.sub(r"[()]", " ", licence) if re.search(r"\b(AND|OR|WITH)\b", licence) else licence
    return any(all(_ALLOWED.search(part) for part in re.split(r"\s(?:AND|WITH)\s", choice)) for choice in terms.split(" OR "))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
