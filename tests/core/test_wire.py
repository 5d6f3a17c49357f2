"""Splitting JSON: what stands where, the same by the fast and the slow way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_policies import wire

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def written(draw: st.DrawFn, value: Any) -> bytes:
    """JSON text with white space and escapes as some client might write it."""
    indent = draw(st.sampled_from([None, 1]))
    separators = draw(st.sampled_from([(",", ":"), (" , ", " : "), (", ", ": ")])) if indent is None else None
    return json.dumps(value, indent=indent, separators=separators, ensure_ascii=draw(st.booleans())).encode(
        "utf-8", "surrogatepass"
    )


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.data(), st.dictionaries(st.text(max_size=5), VALUES, max_size=5))
def test_both_ways_find_the_same_values_in_objects(data: st.DataObject, value: dict[str, Any]) -> None:
    raw = data.draw(written(value))
    try:
        raw.decode()
    except UnicodeDecodeError:
        return
    spans = wire.object_spans(raw)
    assert spans == wire._slow_object_spans(raw)
    assert {key: json.loads(raw[start:end]) for key, (start, end) in spans.items()} == value


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.data(), st.lists(VALUES, max_size=5))
def test_both_ways_find_the_same_values_in_arrays(data: st.DataObject, value: list[Any]) -> None:
    raw = data.draw(written(value))
    try:
        raw.decode()
    except UnicodeDecodeError:
        return
    spans = wire.array_spans(raw)
    assert spans == wire._slow_array_spans(raw)
    assert [json.loads(raw[start:end]) for start, end in spans] == value


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":1,"a":1}',
        b'{"a":1,"a":22}',
        b'{"a":22,"a":1}',
        b'{"a":1e400,"a":1}',
        b'{"a":{"x":1},"b":2,"a":3}',
        b"[1]",
        b'"x"',
        b"",
        b"{",
        b'{"a":}',
        b'{"a":1}x',
        b'{"a":"\xff\\ud83c"}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\xef\xbb\xbf{}",
    ],
)
def test_what_is_not_one_object_with_unique_keys_is_unreadable(raw: bytes) -> None:
    with pytest.raises(wire.Unreadable):
        wire.object_spans(raw)


@pytest.mark.parametrize("value", [b'"\\ud83c"', b"1e400", b"-1e999", b"12345678901234567890123"])
def test_what_providers_accept_is_read(value: bytes) -> None:
    raw = b'{ "k\\u00e9": ' + value + b' , "z":0.10 }'
    spans = wire.object_spans(raw)
    assert {key: raw[start:end] for key, (start, end) in spans.items()} == {"ké": value, "z": b"0.10"}
    assert wire.value_of(value) == json.loads(value)


def test_invalid_utf8_is_told_without_text() -> None:
    with pytest.raises(wire.Unreadable, match="byte 4"):
        wire.check_encoding(b"abc \xff secret")
