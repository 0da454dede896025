"""What an install brings: every version with its hashes, only licences that are allowed, and a list of it beside the wheel."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import dependencies  # noqa: E402


def test_hashes_are_of_the_pinned_versions_and_licences_are_allowed():
    assert dependencies.check() == []


def test_another_version_is_named(monkeypatch, tmp_path):
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(re.sub(r"peft==\S+", "peft==0.1", dependencies.CONSTRAINTS.read_text()))
    monkeypatch.setattr(dependencies, "CONSTRAINTS", constraints)
    (problem,) = dependencies.check()
    assert "peft" in problem and "0.1" in problem


def test_every_direct_dependency_is_there_and_no_address_is():
    text = dependencies.HASHED.read_text()
    assert "://" not in text and {"torch", "transformers", "gradio"} <= set(dependencies.hashed_pins())


@pytest.mark.parametrize(
    "licence", ["GPL-3.0", "GNU Lesser General Public License v3", "MIT AND AGPL-3.0-only", "", "Proprietary"]
)
def test_other_licences_are_refused(licence):
    assert not dependencies.is_allowed(licence)


@pytest.mark.parametrize(
    "licence", ["MIT", "GPL-2.0 OR BSD-3-Clause", "MPL-2.0 AND (Apache-2.0 OR MIT)", "Apache Software License"]
)
def test_licences_that_may_be_passed_on_are_allowed(licence):
    assert dependencies.is_allowed(licence)


@pytest.mark.parametrize("licence", ["Other/Proprietary License", "LicenseRef-NVIDIA-Proprietary", ""])
def test_cudas_libraries_are_allowed_by_name(licence):
    assert dependencies.is_allowed(licence, "nvidia-nvtx") and dependencies.is_allowed(licence, "cuda-toolkit")
    assert not dependencies.is_allowed(licence, "numpy")


def test_the_list_beside_the_wheel_has_every_component_with_its_hashes():
    components = dependencies.sbom("1.0")["components"]
    assert len(components) == len(dependencies.hashed_pins())
    for component in components:
        assert component["purl"] == f"pkg:pypi/{component['name']}@{component['version']}"
        assert all(len(file["hashes"]) == 1 for file in component["externalReferences"])
