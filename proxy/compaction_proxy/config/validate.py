"""From pydantic's errors to problems: each at its place in the file, in words that name the value seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from compaction_proxy.config import hints
from compaction_proxy.config.nodes import Entry, Map, Node, Scalar, Sequence, find, plain
from compaction_proxy.config.report import Mark, Problem, closest, did_you_mean, join
from compaction_proxy.config.schema import SECRET_KEYS, Section

S = TypeVar("S", bound=Section)

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "null",
}
_RANGE = {
    "greater_than": "greater than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
}


def validate(section: type[S], node: Node) -> tuple[S | None, tuple[Problem, ...]]:
    """Check a tree against the schema.

    Returns:
        The section, or ``None`` where there is a problem; and all problems.
    """
    node, problems = _strategy_kinds(node)
    try:
        value = section.model_validate(plain(node))
    except ValidationError as error:
        return None, (*problems, *_Mapper(section, node).problems(error.errors()))
    return (None if problems else value), problems


class _Mapper:
    def __init__(self, root: type[Section], node: Node) -> None:
        self.root = root
        self.node = node

    def problems(self, errors: list[ErrorDetails]) -> list[Problem]:
        """Errors of one value (one per variant that it could have been) become one problem."""
        groups: dict[str, list[ErrorDetails]] = {}
        for error in errors:
            groups.setdefault(self._path(error), []).append(error)
        paths = list(groups)
        return [
            self._problem(path, group)
            for path, group in groups.items()
            if not (self._variants_only(group) and any(p.startswith((f"{path}.", f"{path}[")) for p in paths))
        ]

    def _path(self, error: ErrorDetails) -> str:
        _, _, path = find(self.node, error["loc"])
        return join(path, str(error["loc"][-1])) if error["type"] == "missing" else path

    def _variants_only(self, group: list[ErrorDetails]) -> bool:
        return all(error["type"] in _EXPECTED or error["type"] == "literal_error" for error in group)

    def _problem(self, path: str, group: list[ErrorDetails]) -> Problem:
        error = next((e for e in group if e["type"] not in _EXPECTED and e["type"] != "literal_error"), group[0])
        loc = error["loc"]
        node, key_mark, _ = find(self.node, loc)
        key = path.rpartition(".")[2].partition("[")[0]
        mark = node.mark
        match error["type"]:
            case "extra_forbidden":
                return Problem(key_mark, path, hints.unknown_key(str(loc[-1]), hints.section_at(self.root, loc)))
            case "missing":
                return Problem(mark, path, "required key is missing")
            case "union_tag_not_found":
                return Problem(mark, join(path, "kind"), "required key is missing")
            case "union_tag_invalid":
                kind, kind_mark, _ = find(node, ("kind",))
                known = [str(tag).strip("'") for tag in error["ctx"]["expected_tags"].split(", ")]
                return Problem(kind.mark, join(path, "kind"), _choice(kind, known, False))
            case "string_pattern_mismatch":
                where = key_mark if loc[-1] == "[key]" else mark
                return Problem(
                    where,
                    path,
                    "a name is 1 to 64 letters, digits, '.', '_' or '-', and begins with one of the first two",
                )
            case "string_too_short" | "too_short":
                return Problem(mark, path, "must not be empty")
            case "finite_number":
                return Problem(mark, path, f"expected a finite number, got {seen(node, loc)}")
            case "config":
                got = f", got {seen(node, loc)}" if error["ctx"]["name_value"] else ""
                return Problem(mark, path, f"{error['msg']}{got}")
            case kind if kind in _RANGE:
                return Problem(mark, path, self._range(error, node, key))
            case _:
                return Problem(mark, path, self._expected(group, node, key, loc))

    def _range(self, error: ErrorDetails, node: Node, key: str) -> str:
        bound = _RANGE[error["type"]].format(**error["ctx"])
        hint = hints.ratio_hint(error["input"]) if key.endswith("Ratio") else ""
        return f"must be {bound}, got {seen(node, error['loc'])}{hint}"

    def _expected(self, group: list[ErrorDetails], node: Node, key: str, loc: tuple[str | int, ...]) -> str:
        words: list[str] = []
        choices: list[str] = []
        for error in group:
            if error["type"] == "literal_error":
                choices += [word.strip("'") for word in error["ctx"]["expected"].replace(" or ", ", ").split(", ")]
            else:
                words.append(_EXPECTED.get(error["type"], error["msg"]))
        if choices and not words:
            return _choice(node, choices, _secret(loc))
        expected = " or ".join([*dict.fromkeys(words), *(f"'{choice}'" for choice in choices)])
        return f"expected {expected}, got {seen(node, loc)}{self._hint(group, node, key)}"

    def _hint(self, group: list[ErrorDetails], node: Node, key: str) -> str:
        if not isinstance(node, Scalar) or node.expanded:
            return ""
        types = {error["type"] for error in group}
        if types & {"int_type", "float_type"}:
            return hints.number_hint(key, node.value)
        return hints.switch_hint(node.value) if "bool_type" in types else ""


def _choice(node: Node, known: list[str], secret: bool) -> str:
    expected = " or ".join(f"'{word}'" for word in known)
    message = f"expected {expected}, got {'another value' if secret else seen(node, ())}"
    if not isinstance(node, Scalar) or node.expanded:
        return message
    if node.text in hints.LATER_VALUES:
        return f"{message}: {hints.NOT_AVAILABLE}"
    return f"{message}{did_you_mean(node.text, known)}" if closest(node.text, known) else message


def seen(node: Node, loc: tuple[str | int, ...]) -> str:
    """The value seen, as it is written; never a secret, nor what a variable holds."""
    if isinstance(node, Map):
        return "a mapping"
    if isinstance(node, Sequence):
        return "a list"
    if node.expanded:
        return f"the value of '{node.text}'" if node.variable else f"'{node.text}'"
    if _secret(loc):
        return {bool: "a switch", int: "a number", float: "a number", str: "a string"}.get(type(node.value), "null")
    if isinstance(node.value, str):
        return f"'{shorten(node.value)}'"
    return shorten(node.text) or "null"


def shorten(text: str) -> str:
    """The text on one line, at most 60 characters of it."""
    line = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return line if len(line) <= 60 else f"{line[:57]}..."


def _secret(loc: tuple[str | int, ...]) -> bool:
    return any(part in SECRET_KEYS for part in loc)


def _strategy_kinds(node: Node) -> tuple[Node, tuple[Problem, ...]]:
    """Strategies that say ``type`` for ``kind``: one problem each, and the rest is checked as if it were right."""
    problems: list[Problem] = []

    def walk(node: Node, path: str, strategies: bool) -> Node:
        if isinstance(node, Sequence):
            return Sequence(node.mark, tuple(walk(n, join(path, i), strategies) for i, n in enumerate(node.items)))
        if not isinstance(node, Map):
            return node
        entries: Mapping[str, Entry] = node.entries
        if strategies and "type" in entries and "kind" not in entries:
            problems.append(Problem(entries["type"].mark, join(path, "type"), "unknown key; did you mean 'kind'?"))
            entries = {("kind" if key == "type" else key): entry for key, entry in entries.items()}
        return Map(
            node.mark,
            {k: Entry(e.mark, walk(e.node, join(path, k), k == "strategies")) for k, e in entries.items()},
        )

    return walk(node, "", False), tuple(problems)


def mark_of(node: Node, *loc: str | int) -> Mark:
    """Where the value at ``loc`` stands, or the nearest value above it."""
    return find(node, loc)[0].mark


def text_at(node: Node, *loc: Any) -> str | None:
    """The string at ``loc``, if there is one."""
    for part in loc:
        if isinstance(node, Map) and part in node.entries:
            node = node.entries[part].node
        elif isinstance(node, Sequence) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
        else:
            return None
    return str(node.value) if isinstance(node, Scalar) and isinstance(node.value, str) else None
