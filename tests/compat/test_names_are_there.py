"""Each patched or overridden name exists in the installed library."""

import pytest
from patched_names import OVERRIDDEN, PATCHED, UNSEEN

from finetune.compat import owner_of


@pytest.mark.parametrize("name", [*PATCHED, *OVERRIDDEN])
def test_the_library_has_the_name(name):
    owner, attribute = owner_of(name)
    assert hasattr(owner, attribute)


def test_only_patched_and_overridden_names_are_listed_as_unseen():
    assert {name for name in UNSEEN if not name.startswith("triton.")} <= {*PATCHED, *OVERRIDDEN}


@pytest.mark.parametrize("name", ["torch.nn.gone.name", "no_library.name"])
def test_a_name_whose_owner_is_gone_is_detected(name):
    with pytest.raises((AttributeError, ImportError)):
        owner_of(name)
