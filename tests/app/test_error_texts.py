"""Errors on the page in Chinese: each text of the source has its entry, and what users meet has no English but names."""

import ast

from app.language import catalogue
from tests.app.error_templates import ROOT, error_templates, shape


def test_every_error_has_its_chinese():
    """Those that lack it as entries to fill in: python -m tests.app.error_templates"""
    entries = {shape(text) for text in catalogue("zh", "error")}
    assert sorted(text for text in error_templates() if shape(text) not in entries) == []


def test_the_catalogue_has_no_error_that_is_in_no_text_of_the_source():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")]
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    shapes = {shape(text) for text in error_templates()}
    assert [text for text in catalogue("zh", "error") if shape(text) not in shapes and text not in texts] == []
