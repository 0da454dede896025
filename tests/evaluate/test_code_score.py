"""Code is scored by its tests, and what it runs in lets nothing in or out."""

import json
import shutil

import pytest

from finetune.errors import CommandError, DataError, PackagesError
from finetune.evaluate import code_score
from finetune.evaluate.scorers import scorer

ADD = "def add(a, b):\n    return a + b\n"
PROMPT = "Write add(a, b)."


def write_tests(tmp_path, *rows):
    path = tmp_path / "tests.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def add_score(tmp_path):
    return scorer("code", tests=write_tests(tmp_path, {"prompt": PROMPT, "tests": "assert add(1, 2) == 3"})).score_answer


def test_a_line_of_tests_ends_at_a_newline_only(tmp_path):
    row = json.dumps({"prompt": "a\u2028b\x85c", "tests": "assert True"}, ensure_ascii=False)
    assert code_score._read_tests(write_tests(tmp_path, row)) == {"a\u2028b\x85c": "assert True"}


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("answer", "score", "valid"),
    [
        (ADD, 1, True),
        (f"Here it is:\n```python\n{ADD}```\nDone.", 1, True),
        (ADD.replace("+", "-"), 0, True),
        ("I don't know.", 0, False),
        ("", 0, False),
        ("raise SystemExit(0)", 0, True),
        ("import os\nos._exit(0)", 0, True),
        ("def add(a, b):\n    raise SystemExit", 0, True),
        ("print('all tests passed'); raise SystemExit", 0, True),
        (f"{ADD}print('x' * 10**9)", 0, True),
        (f"{ADD}x = bytearray(2**32)", 0, True),
        ("def add(a, b):\n    return a + '\udc80'", 0, False),
    ],
)
def test_an_answer_counts_when_all_tests_pass(add_score, answer, score, valid):
    result = add_score(PROMPT, ADD, answer)
    assert (result.score, result.valid) == (score, valid)


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "attempt",
    [
        "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)",
        "open({secret!r}).read()",
        "open({secret!r}, 'w').write('changed')",
        "open('/usr/changed', 'w')",
        "import os\nassert 'SECRET' in os.environ",
        "import os, signal\nos.kill({pid}, 0)",
    ],
)
def test_code_reaches_neither_network_nor_files_nor_processes(tmp_path, monkeypatch, attempt):
    import os
    import socket

    secret = tmp_path / "secret"
    secret.write_text("kept")
    monkeypatch.setenv("SECRET", "kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        attempt = attempt.format(port=server.getsockname()[1], secret=str(secret), pid=os.getpid())
        score = scorer("code", tests=write_tests(tmp_path, {"prompt": PROMPT, "tests": "pass"})).score_answer
        exec(attempt, {})  # it works outside, so the sandbox stops it
        secret.write_text("kept")
        assert score(PROMPT, ADD, attempt).score == 0 and secret.read_text() == "kept"


@pytest.mark.sandbox
def test_code_without_end_is_stopped(add_score, monkeypatch):
    monkeypatch.setattr(code_score, "_RUN_S", 1)
    assert add_score(PROMPT, ADD, "while True: pass").score == 0


@pytest.mark.sandbox
def test_tests_are_read_as_mbpp_and_humaneval_have_them(tmp_path):
    mbpp = {"prompt": "one", "test_setup_code": "import math", "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}
    human = {"prompt": "two", "test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"}
    score = scorer("code", tests=write_tests(tmp_path, mbpp, "", human)).score_answer
    for prompt in ("one", "two"):
        assert [score(prompt, ADD, answer).score for answer in (ADD, "add = max")] == [1, 0]


@pytest.mark.sandbox
def test_a_row_whose_own_answer_fails_or_that_has_no_tests_is_reported(add_score):
    with pytest.raises(DataError, match="does not pass its tests"):
        add_score(PROMPT, "add = max", ADD)
    with pytest.raises(DataError, match="no tests for the prompt"):
        add_score("Write mul.", ADD, ADD)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"prompt": "a"}', '{"prompt": 1, "tests": "pass"}', '{"prompt": "a", "tests": "def"}',
             '{"prompt": "a", "test_list": [1]}', '{"prompt": "a", "test": "pass", "entry_point": "a b"}']
)  # fmt: skip
def test_a_line_without_tests_is_named(tmp_path, line):
    with pytest.raises(CommandError, match="line 2: not a prompt with tests"):
        scorer("code", tests=write_tests(tmp_path, {"prompt": "b", "tests": "pass"}, line))


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    path = write_tests(tmp_path, {"prompt": "a", "tests": "pass"}, {"prompt": "a ", "tests": "x = 1"})
    for name, tests, message in (
        ("code", None, "needs --tests"), ("exact", path, "belongs to --score code"),
        ("code", path, "other tests in an earlier"), ("code", str(tmp_path / "none"), "can't be read"),
    ):  # fmt: skip
        with pytest.raises(CommandError, match=message):
            scorer(name, tests=tests)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    code_score._sandbox_problem.cache_clear()
    with pytest.raises(PackagesError, match="bwrap is not installed"):
        scorer("code", tests=write_tests(tmp_path, {"prompt": "a", "tests": "pass"}))
    code_score._sandbox_problem.cache_clear()


def test_a_python_that_is_installed_below_tmp_is_not_hidden():
    command = code_score._sandbox()
    assert command.index("/tmp") < command.index("--ro-bind")
