"""What `make test-edge` does to the installed package's requirements."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from without_upper_bounds import without_upper_bounds


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch<2.16,>=2.11", "torch>=2.11"),
        ("torch>=2.11,<2.16", "torch>=2.11"),
        ("torch>=2.11,!=2.12,<=2.16", "torch>=2.11,!=2.12"),
        ("rich<17", "rich"),
        ("gradio[x]<7,>=6.24; python_version<'3.14'", "gradio[x]>=6.24; python_version<'3.14'"),
        ("types-PyYAML", "types-PyYAML"),
    ],
)
def test_only_upper_bounds_are_removed(before, after):
    text = "Metadata-Version: 2.4\nRequires-Dist: {}\n\nReads a<2 and b.\n"
    assert without_upper_bounds(text.format(before)) == text.format(after)
