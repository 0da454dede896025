"""Strict YAML 1.2 with line numbers, and YAML 1.1 for files of other tools."""

# YAML 1.1 reads `no` as false, 010 as 8, 12:30 as 750 and 1e-4 as text. Other tools read their files so, with PyYAML. Duplicate
# keys and alias bombs are refused in all files.

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from finetune.errors import RecipeError

#: Values by key, as a file has them, nested.
Values = dict[str, Any]
MAX_BYTES, MAX_DEPTH, MAX_NODES = 1_000_000, 12, 10_000
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NO_TEXT = re.compile("[\x00\ud800-\udfff]")
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_CONSTRUCTED = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null")}
#: Tags that a scalar gets without writing one.
_IMPLICIT = {*_CONSTRUCTED, *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "timestamp", "merge", "value"))}
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def parse(text: str, name: str, yaml_1_1: bool = False) -> Document:
    """Parse a mapping. Raises RecipeError if it is not YAML."""
    # `yaml_1_1`: as PyYAML, so that yes and on are true, and anchors and merge keys are followed
    if len(text) > MAX_BYTES:
        raise RecipeError(f"{name}: {len(text):,} characters are too many for a recipe; the limit is {MAX_BYTES:,}")
    try:
        _refuse_hostile(text, name, yaml_1_1)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        position = getattr(error, "problem_mark", None)
        location = f"{name}:{position.line + 1}" if position else name
        raise RecipeError(f"{location}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if root is None:
        raise RecipeError(f"{name}: the file is empty", "Start from `finetune recipes show tiny-cpu`.")
    if not isinstance(root, yaml.MappingNode):
        fix = "Start from `finetune recipes show tiny-cpu`, or convert another tool's YAML file: finetune convert FILE"
        if isinstance(root, yaml.SequenceNode):
            fix = f"If it is data: finetune data tiny-cpu dataset.path={name}"
        raise RecipeError(f"{name}: not a recipe; it must be a mapping of `key: value` lines", fix)
    return Document(root, name, yaml_1_1)


def parse_value(text: str) -> Any:
    """Parse the value of an override; other text than YAML is literal."""
    if not text.strip():
        return None
    if _NO_TEXT.search(text):
        raise RecipeError(f"{ascii(text)} has a zero byte or bytes that are not UTF-8")
    try:
        document = parse(f"value: {text}", "override")
    except RecipeError:
        return text
    return text if document.problems else document.values["value"]


def dump(values: Values) -> str:
    """Return YAML that `parse` reads back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _refuse_hostile(text: str, name: str, allow_aliases: bool) -> None:
    depth = nodes = documents = 0  # before `compose`, which recurses into nested nodes
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        location = f"{name}:{event.start_mark.line + 1 if event.start_mark else 0}"
        documents += isinstance(event, yaml.DocumentStartEvent)
        if isinstance(event, yaml.AliasEvent) and not allow_aliases:
            raise RecipeError(f"{location}: aliases (*{event.anchor}) are not used in recipes; write the value out")
        if isinstance(event, yaml.ScalarEvent) and _NO_TEXT.search(event.value):
            raise RecipeError(f"{location}: zero bytes and lone surrogates (\\u0000, \\ud800 to \\udfff) are not allowed")
        nodes += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH or nodes > MAX_NODES or documents > 1:
            raise RecipeError(f"{location}: nested too deep, too long, or more than one document; a recipe is one flat list")


class Document:
    """Parsed values, with their lines."""

    def __init__(self, root: yaml.MappingNode, name: str, yaml_1_1: bool) -> None:
        #: Line, from 1, of each dotted path.
        self.lines: dict[str, int] = {}
        self.problems: list[str] = []  # refused values; syntax errors are raised
        self._name, self._yaml_1_1 = name, yaml_1_1
        self._nodes = 0  # an alias is counted each time it is used
        self.values = self._mapping(root, "")

    def _value(self, node: yaml.Node, path: str) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or path.count(".") > 10 * MAX_DEPTH:
            raise RecipeError(f"{self._name}:{node.start_mark.line + 1}: nested too deep or too long, with its aliases")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, f"{path}.{index}") for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        scalar = _scalar_1_1 if self._yaml_1_1 else _scalar
        return scalar(node, self.problems, f"{self._name}:{node.start_mark.line + 1}")

    def _mapping(self, node: yaml.MappingNode, path: str) -> Values:
        values: Values = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(f"{self._name}:{line}: a key must be a plain word")
                continue
            key = key_node.value
            key_path = f"{path}.{key}" if path else key
            if key in values:
                self.problems.append(
                    f"{self._name}:{line}: '{key_path}' is set twice (first on line {self.lines[key_path]}); keep one"
                )
                continue
            self.lines[key_path] = line
            values[key] = self._value(value_node, key_path)
        # `<<: *defaults` adds keys that the mapping doesn't set
        defaults = values.pop("<<", {}) if self._yaml_1_1 else {}
        for mapping in reversed(defaults) if isinstance(defaults, list) else [defaults]:
            values = {**mapping, **values} if isinstance(mapping, dict) else values
        return values


def _scalar(node: yaml.ScalarNode, problems: list[str], location: str) -> Any:
    text = node.value
    if node.style is not None:  # quoted or a block: text is meant
        return text
    if node.tag not in _IMPLICIT:
        problems.append(f"{location}: tags ({node.tag}) are not used in recipes")
        return None
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if _NOT_FINITE.fullmatch(text):
        problems.append(f"{location}: {text} is not a finite number")
        return None
    if _INT.fullmatch(text):
        return int(text) if len(text) < 20 else text  # a signed 64-bit integer has up to 19 digits
    if _FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0[0-9]+", text):
        value = float(text)
        if math.isinf(value):
            problems.append(f"{location}: {text} is too large for a float")
            return None
        return value
    return text


def _scalar_1_1(node: yaml.ScalarNode, problems: list[str], location: str) -> Any:
    # as PyYAML, except that 1e-4 is a number, as the tools convert that text, and dates stay text
    if node.style is not None or node.tag not in _CONSTRUCTED:
        return _scalar(node, problems, location) if node.tag != _TIMESTAMP else node.value
    try:
        value = yaml.constructor.SafeConstructor().construct_object(node)
    except (yaml.YAMLError, ValueError):
        return _scalar(node, problems, location)
    return value if value is None or abs(value) < float("inf") else _scalar(node, problems, location)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which `parse` would misread."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    is_read_back = _scalar(yaml.ScalarNode("tag:yaml.org,2002:str", text, style=None), [], "") == text and text == text.strip()
    has_syntax = any(letter in text for letter in ":#{}[]&*!|>'\"%@`,\n\t\\") or text[:1] in "-?" or not text.isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_read_back and not has_syntax else '"')


_Dumper.add_representer(str, _represent_text)
