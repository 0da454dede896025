"""What an install brings: every version with its hashes, only licences that are allowed, and a list of it beside the wheel."""

import re

import dependencies


def test_every_direct_dependency_is_there_with_its_hash_and_an_allowed_licence():
    assert dependencies.check() == []
    text = dependencies.HASHED.read_text()
    assert "://" not in text and {"torch", "transformers", "gradio"} <= set(dependencies.hashed_pins())


def test_another_version_is_named(monkeypatch, tmp_path):
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(re.sub(r"peft==\S+", "peft==0.1", dependencies.CONSTRAINTS.read_text()))
    monkeypatch.setattr(dependencies, "CONSTRAINTS", constraints)
    (problem,) = dependencies.check()
    assert "peft" in problem and "0.1" in problem


def test_licences_that_may_be_passed_on_are_allowed_and_the_list_beside_the_wheel_has_every_component():
    for licence in ("GPL-3.0", "GNU Lesser General Public License v3", "MIT AND AGPL-3.0-only", "", "Proprietary"):
        assert not dependencies.is_allowed(licence), licence
    for licence in ("MIT", "GPL-2.0 OR BSD-3-Clause", "MPL-2.0 AND (Apache-2.0 OR MIT)", "Apache Software License"):
        assert dependencies.is_allowed(licence), licence
    for licence in ("Other/Proprietary License", "LicenseRef-NVIDIA-Proprietary", ""):
        assert dependencies.is_allowed(licence, "nvidia-nvtx") and dependencies.is_allowed(licence, "cuda-toolkit")
        assert not dependencies.is_allowed(licence, "numpy")
    components = dependencies.sbom("1.0")["components"]
    assert len(components) == len(dependencies.hashed_pins())
    for component in components:
        assert component["purl"] == f"pkg:pypi/{component['name']}@{component['version']}"
        assert all(len(file["hashes"]) == 1 for file in component["externalReferences"])
