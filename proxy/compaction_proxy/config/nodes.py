"""YAML 1.2 core schema as a tree of nodes that know where they stand. No meaning of any key is known here.

What differs from plain PyYAML: ``yes``, ``no``, ``on``, ``off`` and ``1_000`` are strings; a key given twice is a problem;
tags are not supported; aliases are bounded (no billion laughs). ``${VAR}`` is read after parsing, so that a value from
the environment can never become YAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import yaml

from compaction_proxy.config.report import Mark, Problem, join

MAX_BYTES = 1 << 20
MAX_NODES = 50_000
"""A file of policies has hundreds of nodes; aliases count once per use."""

MAX_DEPTH = 50
MAX_DIGITS = 40
"""A longer run of digits is text: no key holds such a number."""

_CORE = "tag:yaml.org,2002:"
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|(?P<bad>\{[^}]*\}?))")
_ONLY_VARIABLE = re.compile(r"^\$\{[A-Za-z_][A-Za-z0-9_]*(?::-[^}]*)?\}$")

Core: TypeAlias = None | bool | int | float | str


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value. ``text`` is what the file says; ``variable`` = the whole value is one ``${VAR}``."""

    mark: Mark
    value: Core
    text: str
    quoted: bool = False
    expanded: bool = False
    variable: bool = False


@dataclass(frozen=True, slots=True)
class Sequence:
    mark: Mark
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value; ``mark`` is where the key stands."""

    mark: Mark
    node: Node


@dataclass(frozen=True, slots=True)
class Map:
    mark: Mark
    entries: Mapping[str, Entry]


Node: TypeAlias = Scalar | Sequence | Map


class EnvText(str):
    """A value that was exactly one ``${VAR}``: text, or by the core rules a number or a switch where one is wanted."""

    __slots__ = ()

    def core(self) -> Core:
        return core_value(str(self))


def core_value(text: str) -> Core:
    """What a plain scalar means by YAML 1.2's core schema."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text) and len(text) <= MAX_DIGITS:
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.match(text) and len(text) <= MAX_DIGITS:
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


def parse(data: bytes, file: str) -> tuple[Node | None, tuple[Problem, ...]]:
    """Read one document.

    Args:
        data: UTF-8, at most :data:`MAX_BYTES`.
        file: the name that problems carry.

    Returns:
        The tree (``None`` if it cannot be read at all) and every problem of form.
    """
    if len(data) > MAX_BYTES:
        return None, (Problem(Mark(file), "", f"larger than {MAX_BYTES} bytes"),)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        mark = Mark(file, before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1)
        return None, (Problem(mark, "", "not UTF-8 text"),)
    builder = _Builder(file)
    try:
        root = yaml.compose(text, Loader=_Loader)
        node = builder.build(root, "") if root is not None else None
    except yaml.MarkedYAMLError as error:
        return None, (_syntax(error, text, file),)
    except yaml.reader.ReaderError as error:
        before_text = text[: error.position]
        mark = Mark(file, before_text.count("\n") + 1, error.position - before_text.rfind("\n"))
        return None, (Problem(mark, "", f"not YAML: character U+{error.character:04X} is not allowed"),)
    except RecursionError:
        return None, (Problem(Mark(file), "", "nested too deeply"),)
    except _TooLargeError as error:
        return None, (error.problem,)
    if node is None:
        return None, (Problem(Mark(file, 1, 1), "", "the file is empty"),)
    return node, tuple(builder.problems)


def _syntax(error: yaml.MarkedYAMLError, text: str, file: str) -> Problem:
    where = error.problem_mark or error.context_mark
    mark = Mark(file, where.line + 1, where.column + 1) if where else Mark(file)
    told = [part for part in (error.context, error.problem) if part]
    message = f"not YAML: {', '.join(told[-1:] if told[-1:] and not told[-1].startswith('but ') else told)}"
    lines = text.splitlines()
    if mark.line and mark.line <= len(lines) and "${" in lines[mark.line - 1]:
        message += '; inside { } and [ ] write "${VAR}" in quotes'
    return Problem(mark, "", message)


class _TooLargeError(Exception):
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


class _Builder:
    """One walk over PyYAML's node graph; aliases are followed, within bounds."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self.nodes = 0
        self.open: set[int] = set()

    def build(self, source: yaml.Node, path: str) -> Node:
        mark = self._mark(source)
        if len(self.open) > MAX_DEPTH:
            raise _TooLargeError(Problem(mark, path[:60], "nested too deeply"))
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise _TooLargeError(Problem(mark, path, f"more than {MAX_NODES} values; aliases count once per use"))
        if id(source) in self.open:
            raise _TooLargeError(Problem(mark, path, "an alias refers to a value that contains it"))
        if isinstance(source, yaml.ScalarNode):
            return self._scalar(source, mark, path)
        kind = "map" if isinstance(source, yaml.MappingNode) else "seq"
        if source.tag != _CORE + kind:
            self._tag(source, mark, path)
        self.open.add(id(source))
        try:
            if isinstance(source, yaml.MappingNode):
                return self._map(source, mark, path)
            return Sequence(mark, tuple(self.build(item, join(path, i)) for i, item in enumerate(source.value)))
        finally:
            self.open.discard(id(source))

    def _scalar(self, source: yaml.ScalarNode, mark: Mark, path: str) -> Scalar:
        quoted = source.style is not None
        if source.tag not in (_CORE + "str", "!"):
            self._tag(source, mark, path)
        text = str(source.value)
        return Scalar(mark, text if quoted else core_value(text), text, quoted)

    def _map(self, source: yaml.MappingNode, mark: Mark, path: str) -> Map:
        entries: dict[str, Entry] = {}
        for key, value in source.value:
            key_mark = self._mark(key)
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(Problem(key_mark, path, "a key must be a string"))
                continue
            name = str(key.value)
            if key.style is None and not isinstance(core_value(name), str):
                self.problems.append(Problem(key_mark, path, f"a key must be a string, got {name or 'null'}"))
            if name in entries:
                first = entries[name].mark.line
                self.problems.append(Problem(key_mark, join(path, name), f"duplicate key; first given on line {first}"))
                continue
            entries[name] = Entry(key_mark, self.build(value, join(path, name)))
        return Map(mark, entries)

    def _tag(self, source: yaml.Node, mark: Mark, path: str) -> None:
        tag = source.tag.replace(_CORE, "!!")
        self.problems.append(Problem(mark, path, f"the tag {tag} is not supported"))

    def _mark(self, source: yaml.Node) -> Mark:
        return Mark(self.file, source.start_mark.line + 1, source.start_mark.column + 1)


def expand(node: Node, env: Mapping[str, str], path: str = "") -> tuple[Node, tuple[Problem, ...]]:
    """The tree with ``${VAR}``, ``${VAR:-default}`` and ``$$`` resolved in all string values; keys stay as they are.

    Returns:
        The new tree, and a problem per variable that is not set and has no default.
    """
    problems: list[Problem] = []

    def walk(node: Node, path: str) -> Node:
        if isinstance(node, Map):
            return Map(node.mark, {k: Entry(e.mark, walk(e.node, join(path, k))) for k, e in node.entries.items()})
        if isinstance(node, Sequence):
            return Sequence(node.mark, tuple(walk(item, join(path, i)) for i, item in enumerate(node.items)))
        if not isinstance(node.value, str) or "$" not in node.value:
            return node

        def value(match: re.Match[str]) -> str:
            name, default, bad = match["name"], match["default"], match["bad"]
            if bad is not None:
                problems.append(
                    Problem(node.mark, path, f"'${bad}' is not a variable; write ${{NAME}}, or $$ for a '$'")
                )
                return ""
            if name is None:
                return "$"
            if default is not None and "$" in default:
                problems.append(Problem(node.mark, path, f"the default of {name} cannot hold another variable"))
                return ""
            found = env.get(name)
            if default is not None:
                return found or default
            if found is None:
                message = f"the environment variable {name} is not set; set it, or write ${{{name}:-default}}"
                problems.append(Problem(node.mark, path, message))
                return ""
            return found

        text = _VARIABLE.sub(value, node.value)
        used = any(match["name"] for match in _VARIABLE.finditer(node.value))
        return replace(node, value=text, expanded=used, variable=bool(_ONLY_VARIABLE.match(node.value)))

    return walk(node, path), tuple(problems)


def plain(node: Node) -> Any:
    """The tree as dicts, lists and scalars; a value that is one ``${VAR}`` comes as :class:`EnvText`."""
    if isinstance(node, Map):
        return {key: plain(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    return EnvText(node.value) if node.variable and isinstance(node.value, str) else node.value


def find(node: Node, loc: tuple[str | int, ...]) -> tuple[Node, Mark, str]:
    """The node at ``loc``, the mark of its key, and its path; parts that name no key (variants of a union) are passed over."""
    mark, path = node.mark, ""
    for part in loc:
        if isinstance(node, Map) and isinstance(part, str) and part in node.entries:
            entry = node.entries[part]
            node, mark, path = entry.node, entry.mark, join(path, part)
        elif isinstance(node, Sequence) and isinstance(part, int) and part < len(node.items):
            node, path = node.items[part], join(path, part)
            mark = node.mark
    return node, mark, path


def leaves(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Every scalar and every empty collection with its path."""
    if isinstance(node, Map) and node.entries:
        for key, entry in node.entries.items():
            yield from leaves(entry.node, join(path, key))
    elif isinstance(node, Sequence) and node.items:
        for i, item in enumerate(node.items):
            yield from leaves(item, join(path, i))
    else:
        yield path, node


def merge(base: Node, over: Node) -> Node:
    """``over`` on ``base``: maps merge key by key, everything else replaces. Every node keeps its own mark."""
    if not (isinstance(base, Map) and isinstance(over, Map)):
        return over
    entries = dict(base.entries)
    for key, entry in over.entries.items():
        below = entries.get(key)
        entries[key] = Entry(entry.mark, merge(below.node, entry.node)) if below else entry
    return Map(over.mark, entries)
