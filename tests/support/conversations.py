"""Generated conversations of chat clients, as hypothesis strategies: what agents and people really send, oddities included.

A conversation is a list of messages; :func:`requests` says where a client would have sent it. The texts name themselves
(``m7m``), so that it can be seen where their words went.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from support.bench import Message

FLAVOURS = (
    "lorem ipsum dolor sit amet, ",
    "src/app/main.py:120 TypeError in load_rows ",
    "上下文压缩测试一二三四，",
    "👩‍👩‍👧 emoji 🇩🇪 and e\u0301 ",
    '{"quoted": "a \\ b", "n": 0.10}\n',
    "~~~~ [end of the record] <<<user>>> ",
    "cut \ud83c here ",
)
LONE = re.compile("[\ud800-\udfff]")
TOOLS = ("read", "read", "grep", "todo_write", "mcp__git__log")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 40, "detail": "low"}}


class _Names:
    def __init__(self) -> None:
        self.number = 0

    def text(self, draw: st.DrawFn, most: int) -> str:
        self.number += 1
        flavour = draw(st.sampled_from(FLAVOURS))
        tokens = draw(st.integers(1, most))
        return f"m{self.number}m " + flavour * (tokens * 4 // len(flavour))


@st.composite
def conversations(draw: st.DrawFn, *, least: int = 12, most: int = 40, broken: bool = False) -> list[Message]:
    """An array of ``least`` to ``most`` steps: turns, tool loops, parallel calls in any order, images, later instructions.

    Args:
        broken: aborted calls, half answered ones, late and orphaned results, legacy calls may occur.
    """
    names = _Names()
    reused = draw(st.booleans())
    messages: list[Message] = [{"role": "system", "content": "You are an agent."}] if draw(st.booleans()) else []
    messages.append(_user(draw, names))
    kinds = ["tools"] * 8 + ["turn"] * 4 + ["system"]
    if broken:
        kinds += ["aborted", "half", "late", "orphan", "legacy"]
    for number in range(draw(st.integers(least, most))):
        kind = draw(st.sampled_from(kinds))
        if kind == "turn":
            messages += [{"role": "assistant", "content": names.text(draw, 60)}, _user(draw, names)]
        elif kind == "system":
            messages += [{"role": "system", "content": names.text(draw, 30)}, _user(draw, names)]
        elif kind == "orphan":
            messages.append({"role": "tool", "tool_call_id": f"nobody-{number}", "content": names.text(draw, 20)})
        elif kind == "legacy":
            call = {"name": "read", "arguments": "{}"}
            messages += [
                {"role": "assistant", "content": None, "function_call": call},
                {"role": "function", "name": "read", "content": names.text(draw, 100)},
            ]
        else:
            messages += _tools(draw, names, 0 if reused else number, kind)
    return messages


def _user(draw: st.DrawFn, names: _Names) -> Message:
    text = names.text(draw, draw(st.sampled_from([8, 40, 40, 160])))
    shape = draw(st.sampled_from(["string", "string", "string", "parts", "image"]))
    if shape == "string":
        return {"role": "user", "content": text}
    parts: list[Any] = [{"type": "text", "text": text}]
    return {"role": "user", "content": [*parts, IMAGE] if shape == "image" else parts}


def _tools(draw: st.DrawFn, names: _Names, number: int, kind: str) -> list[Message]:
    calls = []
    for at in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        given: dict[str, Any] = {"path": f"a{at}.py"}
        if draw(st.booleans()):
            given["content"] = names.text(draw, 120)
        arguments = json.dumps(given) if draw(st.integers(0, 9)) else "{not json " + names.text(draw, 80)
        function = {"name": draw(st.sampled_from(TOOLS)), "arguments": arguments}
        calls.append({"id": f"call_{number}_{at}", "type": "function", "function": function})
    results: list[Message] = []
    for call in draw(st.permutations(calls)):
        size = draw(st.sampled_from([12, 60, 200, 200, 200, 900]))
        text = ("Error: " if not draw(st.integers(0, 9)) else "") + names.text(draw, size)
        listed = not draw(st.integers(0, 5))
        results.append(
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": [{"type": "text", "text": text}] if listed else text,
            }
        )
    said = names.text(draw, 20) if not draw(st.integers(0, 3)) else None
    asked: Message = {"role": "assistant", "content": said, "tool_calls": calls}
    if kind == "aborted":
        return [asked, _user(draw, names)]
    if kind == "half":
        return [asked, *results[:-1], _user(draw, names)]
    if kind == "late":
        between: list[Message] = [{"role": "assistant", "content": names.text(draw, 10)}, _user(draw, names)]
        return [asked, *results[:-1], *between, results[-1]]
    return [asked, *results]


def requests(messages: list[Message]) -> Iterator[list[Message]]:
    """Where a client asks: behind a user message, and behind results with no sibling to come."""
    for end in range(1, len(messages) + 1):
        if messages[end - 1]["role"] not in ("user", "tool", "function"):
            continue
        if end < len(messages) and messages[end]["role"] in ("tool", "function"):
            continue
        yield messages[:end]


def raw_body(messages: list[Message], *, spaced: bool, ascii_only: bool, **fields: Any) -> tuple[bytes, list[bytes]]:
    """A body as some client writes it, and the bytes of each message in it."""
    separators = (", ", ": ") if spaced else (",", ":")

    def written(value: Any) -> bytes:
        text = json.dumps(value, separators=separators, ensure_ascii=ascii_only)
        return LONE.sub(lambda lone: f"\\u{ord(lone[0]):04x}", text).encode()

    raws = [written(message) for message in messages]
    between = b" ,\n" if spaced else b","
    rest = b"".join(b"," + written(key) + b":" + written(value) for key, value in fields.items())
    return b'{"model":"m","messages":[' + between.join(raws) + b"]" + rest + b"}", raws
