"""Queries are compared by their rows; what an answer says is never written to the database."""

import sqlite3

import pytest

from finetune.errors import CommandError, DataError
from finetune.evaluate.scorers import scorer


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "shop.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE items (name TEXT, price INTEGER)")
        connection.executemany("INSERT INTO items VALUES (?, ?)", [("a", 1), ("b", 2), ("c", 2)])
    return path


@pytest.mark.parametrize(
    ("expected", "answer", "score", "valid"),
    [
        ("SELECT name FROM items WHERE price = 2", "select items.name from items where 2 = price;", 1, True),
        ("SELECT name FROM items WHERE price = 2", "Here:\n```sql\nSELECT name FROM items WHERE price > 1\n```", 1, True),
        ("SELECT name FROM items", "SELECT name FROM items ORDER BY name DESC", 1, True),
        ("SELECT name FROM items ORDER BY name", "SELECT name FROM items ORDER BY name DESC", 0, True),
        ("SELECT name FROM items", "SELECT DISTINCT price FROM items", 0, True),
        ("SELECT price FROM items", "SELECT DISTINCT price FROM items", 0, True),
        ("SELECT name FROM items", "I don't know.", 0, False),
        ("SELECT name FROM items", "", 0, False),
        ("SELECT name FROM items", "DELETE FROM items", 0, False),
        ("SELECT name FROM items", "ATTACH '/tmp/other' AS other", 0, False),
        ("SELECT name FROM items", "SELECT 1; DROP TABLE items", 0, False),
        ("SELECT name FROM items", "PRAGMA writable_schema = 1", 0, False),
        ("SELECT name FROM items", "SELECT load_extension('x')", 0, False),
        ("SELECT name FROM items", "SELECT '\x00", 0, False),
    ],
)
def test_queries_are_compared_by_their_rows(database, expected, answer, score, valid):
    content = database.read_bytes()
    result = scorer("sql", database=str(database)).score_answer("", expected, answer)
    assert (result.score, result.valid) == (score, valid) and database.read_bytes() == content


def test_a_query_without_end_is_stopped(database, monkeypatch):
    monkeypatch.setattr("finetune.evaluate.sql_score._QUERY_S", 0.2)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"
    assert scorer("sql", database=str(database)).score_answer("", "SELECT 1", endless).valid is False


def test_an_expected_query_that_does_not_run_and_a_missing_database_are_reported(database, tmp_path):
    with pytest.raises(DataError, match="no such table"):
        scorer("sql", database=str(database)).score_answer("", "SELECT * FROM other", "SELECT 1")
    for name, path in (("sql", None), ("sql", str(tmp_path / "none")), ("exact", str(database))):
        with pytest.raises(CommandError):
            scorer(name, database=path)
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(CommandError, match="no SQLite database"):
        scorer("sql", database=str(tmp_path / "text"))
