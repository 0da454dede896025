"""What `finetune chat --tools` refuses, before a model is loaded."""

import pytest

from finetune.cli.chat import read_tools_file
from finetune.errors import CommandError


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", "not JSON"), ("3", "not a list"), ('"x"', "is text"), ("[3]", "not a list"), (None, "can't be read")],
)
def test_a_file_that_has_no_tools_is_refused_with_a_reason(tmp_path, content, reason):
    path = tmp_path / "tools.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CommandError, match=reason):
        read_tools_file(str(path))


def test_tools_are_read_as_in_rows(tmp_path):
    path = tmp_path / "tools.json"
    path.write_text('[{"name": "f", "parameters": {"city": {"type": "str"}}}]')
    [tool] = read_tools_file(str(path))
    assert tool["function"]["parameters"]["required"] == ["city"] and read_tools_file(None) == ()
