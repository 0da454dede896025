"""Answers and losses are saved as they are computed: reused after a kill, and on a full disk only missing later."""

from finetune.evaluate.results import Journal


def test_a_journal_cut_off_anywhere_keeps_its_complete_lines_and_can_be_appended(tmp_path):
    rows = {f"row{number}": {"answer": "ä\n" * number} for number in range(5)}
    complete = Journal(tmp_path, "base", {"adapter": 1})
    for key, entry in rows.items():
        complete.add({key: entry})
    [file] = tmp_path.iterdir()
    content = file.read_bytes()
    for end in range(len(content)):
        file.write_bytes(content[:end])
        truncated = Journal(tmp_path, "base", {"adapter": 1})
        assert all(rows[key] == entry for key, entry in truncated.entries.items())
        truncated.add({"row4": rows["row4"]})
        assert Journal(tmp_path, "base", {"adapter": 1}).entries == {**truncated.entries, "row4": rows["row4"]}


def test_other_inputs_have_another_journal_and_damage_is_ignored(tmp_path):
    Journal(tmp_path, "base", 1).add({"a": {"answer": "x"}})
    assert Journal(tmp_path, "base", 2).entries == {} == Journal(tmp_path, "tuned", 1).entries
    [file] = tmp_path.iterdir()
    file.write_bytes(b"\x00\xff\n[]\n7\n{}\n" + file.read_bytes())
    assert Journal(tmp_path, "base", 1).entries == {"a": {"answer": "x"}}


def test_an_evaluation_that_can_not_write_continues_and_says_so(tmp_path):
    (tmp_path / "file").touch()
    journal = Journal(tmp_path / "file", "base", 1)
    journal.add({"a": {"answer": "x"}})
    assert journal.entries == {"a": {"answer": "x"}} and "not kept" in journal.problem
