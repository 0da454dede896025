"""An absent key is the other tool's own default: writing the default out changes nothing, and what differs is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from finetune.recipe.foreign import TOOLS, convert_text

HERE = Path(__file__).parent / "foreign"
#: By tool, and method after a comma: version, date and source of its defaults; the least file; what finetune makes of it;
#: words of its notes.
TOOLS_DEFAULTS = json.loads((HERE / "defaults.json").read_text())


def with_defaults(least: dict, defaults: dict) -> dict:
    merged = dict(least)
    for key, value in defaults.items():
        merged[key] = with_defaults(least.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def converted(values: dict):
    return convert_text(yaml.safe_dump(values), "x.yaml", ["dataset.path=d.jsonl"] if "dataset_dir" in values else [], HERE)


def test_every_importer_has_its_tools_defaults_with_version_and_source():
    assert {name.partition(",")[0] for name in TOOLS_DEFAULTS} == {tool.name for tool in TOOLS}
    assert all(entry["version"] and entry["date"] and entry["source"] for entry in TOOLS_DEFAULTS.values())


@pytest.mark.parametrize("tool", TOOLS_DEFAULTS)
def test_an_absent_key_is_the_tools_own_default(tool):
    entry = TOOLS_DEFAULTS[tool]
    source = converted(entry["file"])
    assert source[1].tool == tool.partition(",")[0]
    written_out = converted(with_defaults(entry["file"], entry["defaults"]))[0]
    assert source[0].model_dump() == written_out.model_dump()
    for setting, value in entry["expected"].items():
        assert getattr(source[0], setting) == value, setting


@pytest.mark.parametrize("tool", [tool for tool, entry in TOOLS_DEFAULTS.items() if "said" in entry])
def test_a_default_that_finetune_does_not_have_is_said(tool):
    entry = TOOLS_DEFAULTS[tool]
    notes = "\n".join(converted(entry["file"])[1].notes)
    assert all(phrase in notes for phrase in entry["said"])
