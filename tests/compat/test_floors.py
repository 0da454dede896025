"""The lowest versions that pyproject.toml allows: named exactly once more for the tests, and with every name that is used."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from used_names import ROOT, used, used_in

FLOOR = json.loads((Path(__file__).parent / "floor_names.json").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def missing(uses) -> list[str]:
    """Names and keywords that the lowest versions don't have."""
    names = FLOOR["names"]
    lacking = [name for name in uses if name not in names]
    for name, keywords in uses.items():
        taken = names.get(name)
        lacking += [f"{name}({keyword}=)" for keyword in keywords if taken is not None and keyword not in taken]
    return sorted(lacking)


def floors() -> dict[str, str]:
    extras = PROJECT["optional-dependencies"]
    rows = [*PROJECT["dependencies"], *extras["ui"], *extras["vision"], *extras["sweep"], *extras["hybrid"], *extras["test"]]
    return dict(match.groups() for row in rows if (match := re.match(r"([\w-]+)>=([\d.]+)", row)))


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def padded(version: str) -> tuple[int, ...]:
    numbers = [int(number) for number in version.split(".")]
    return tuple(numbers + [0] * (4 - len(numbers)))


def test_the_lowest_versions_are_those_of_the_project_and_have_every_name_and_keyword():
    """If not: ask for it in finetune/compat, or raise the floor and run `make test-lowest`."""
    assert missing(used()) == []
    allowed, pinned = floors(), pins()
    assert allowed.keys() == pinned.keys()
    assert {name: pinned[name] for name in allowed if padded(pinned[name]) != padded(allowed[name])} == {}
    assert {name: FLOOR["versions"][name] for name in FLOOR["versions"]} == {name: pinned[name] for name in FLOOR["versions"]}


@pytest.mark.parametrize(
    "code",
    [
        "from torch.nn.attention.varlen import varlen_attn\nvarlen_attn(q, k, v, enable_gqa=True)",
        "import torch\ntorch.nn.no_such_module",
        "from transformers import NoSuchModel",
        "from peft import LoraConfig as C\nC(r=1, no_such_setting=2)",
        "from peft import LoraConfig\nclass C(LoraConfig):\n    pass\nC(r=1, no_such_setting=2)",
    ],
)
def test_what_the_lowest_versions_lack_is_detected(code):
    assert missing(used_in(code))
