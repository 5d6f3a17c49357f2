"""OpenAI chat completions: ``messages`` -> transcript, and a view's pieces -> the body to forward.

Untouched messages are slices of the client's bytes. Each message is parsed once and remembered by its bytes, so that a
turn pays only for its new messages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from compaction_policies import wire
from compaction_policies.transcript import Call, Group, Item, Media, Part, Role, Transcript

DIALECT = "openai-chat"
_SEED = b"compaction-proxy chain 1 openai-chat"
_LEGACY_CALL = "\x00function_call"
_HEAD_ROLES = ("system", "developer")
_ROLES: dict[str, Role] = {
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "system": "system",
    "developer": "system",
}
_OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_DROPPED_KEYS = frozenset({"cache_control", "prompt_cache_breakpoint"})
_HIDDEN_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
_MEDIA_KINDS = {"image_url": "image", "image": "image", "input_audio": "audio", "audio": "audio", "file": "file"}
_FAILED = re.compile(
    r"\s*(?:\[?\"?(?:error|exception|fatal|failed|failure)\b|traceback \(most recent call last\)|<(?:tool_use_)?error>"
    r"|\{\s*\"(?:error|is_error|isError)\"\s*:(?!\s*(?:null|false|\"\")))"
    r"|(?:.{0,80}\b(?:command failed|exit(?:ed with)? (?:code|status):? ?[1-9]))",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a message says, independent of its place. ``digest`` leaves tool call ids out."""

    role: str
    digest: bytes
    text: str
    parts: tuple[Part, ...]
    calls: tuple[Call, ...]
    answers: str | None
    media: tuple[Media, ...]
    hidden: str
    error: bool


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat completions body, split. ``messages`` are spans of ``body``; ``array`` is the span of the array."""

    body: bytes
    fields: Mapping[str, wire.Span]
    array: wire.Span
    messages: tuple[wire.Span, ...]

    def field(self, name: str) -> Any:
        """The decoded top-level field, ``None`` where absent. Raises :class:`wire.Unreadable`."""
        span = self.fields.get(name)
        return None if span is None else wire.value_of(self.body[span[0] : span[1]])

    @property
    def model(self) -> str:
        model = self.field("model")
        return model if isinstance(model, str) else ""


class Memo:
    """Parsed messages by their bytes, least recently used out first, bounded by the bytes it holds."""

    def __init__(self, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: OrderedDict[bytes, Parsed] = OrderedDict()

    def get(self, raw: bytes) -> Parsed | None:
        parsed = self._known.get(raw)
        if parsed is not None:
            try:
                self._known.move_to_end(raw)
            except KeyError:  # evicted by another thread between the two steps
                return parsed
        return parsed

    def put(self, raw: bytes, parsed: Parsed) -> None:
        if raw in self._known:
            return
        self._known[raw] = parsed
        self._bytes += 3 * len(raw) + 1_000
        while self._bytes > self._max_bytes and len(self._known) > 1:
            old, _ = self._known.popitem(last=False)
            self._bytes -= 3 * len(old) + 1_000


def split(body: bytes, fields: Mapping[str, wire.Span] | None = None) -> ChatRequest:
    """Split a body at its messages without parsing them. Raises :class:`wire.Unreadable`.

    Args:
        fields: the spans of its top-level keys, where the caller has them already.
    """
    wire.check_encoding(body)
    fields = fields or wire.object_spans(body)
    if "messages" not in fields:
        message = "no messages"
        raise wire.Unreadable(message)
    start, end = fields["messages"]
    spans = tuple((start + first, start + last) for first, last in wire.array_spans(body[start:end]))
    return ChatRequest(body, fields, (start, end), spans)


def unknown_bytes(request: ChatRequest, memo: Memo) -> int:
    """Bytes of the messages that :func:`read` would have to parse."""
    return sum(end - start for start, end in request.messages if memo.get(request.body[start:end]) is None)


def read(request: ChatRequest, memo: Memo) -> Transcript:
    """The transcript of a split body. Raises :class:`wire.Unreadable` for messages that are not the dialect's."""
    raws = [request.body[start:end] for start, end in request.messages]
    parsed = [_parsed(raw, memo) for raw in raws]
    first = 0
    while first < len(parsed) and parsed[first].role in _HEAD_ROLES:
        first += 1
    body = parsed[first:]
    groups, group_of, ordinals, answered = _grouped(body)
    items: list[Item] = []
    chain = [_SEED_DIGEST]
    for index, message in enumerate(body):
        fingerprint = message.digest
        call_name = ""
        if message.answers is not None:
            owner, ordinal = ordinals.get(index, (-1, -1))
            place = b"%d:%d:" % (index - owner if owner >= 0 else 0, ordinal)
            fingerprint = hashlib.blake2b(place + message.digest, digest_size=16).digest()
            call_name = body[owner].calls[ordinal].name if owner >= 0 else ""
        chain.append(hashlib.blake2b(chain[-1] + fingerprint, digest_size=16).digest())
        calls = tuple(
            Call(call.id, call.name, call.arguments, call.part, answered.get((index, at)))
            for at, call in enumerate(message.calls)
        )
        items.append(_item(index, raws[first + index], message, fingerprint, calls, call_name))
    head = tuple(_item(-1, raws[at], parsed[at], parsed[at].digest, (), "") for at in range(first))
    return Transcript(
        dialect=DIALECT,
        head=head,
        items=tuple(items),
        groups=groups,
        chain=tuple(chain),
        group_of=group_of,
        schemas=_schemas(request),
        tool_names=_tool_names(request),
        max_tokens=_max_tokens(request),
    )


def assemble(request: ChatRequest, head: int, pieces: Sequence[int | tuple[int, bytes] | bytes]) -> bytes:
    """The body to forward: the head, then the pieces (see :data:`compaction_policies.view.Piece`).

    Neighbours keep what the client wrote between them; a joint gets what stands between its first two messages.
    """
    body, messages = request.body, request.messages
    if not messages:
        return body
    joint = body[messages[0][1] : messages[1][0]] if len(messages) > 1 else b","
    out: list[bytes] = [body[: messages[0][0]]]
    last: int | None = None
    for piece in (*range(-head, 0), *pieces):
        index = None if isinstance(piece, bytes) else (piece if isinstance(piece, int) else piece[0]) + head
        if len(out) > 1:
            neighbours = index is not None and last is not None and index == last + 1
            out.append(body[messages[index - 1][1] : messages[index][0]] if neighbours and index is not None else joint)
        if isinstance(piece, bytes):
            out.append(piece)
        elif isinstance(piece, int) and index is not None:
            out.append(body[messages[index][0] : messages[index][1]])
        elif isinstance(piece, tuple):
            out.append(piece[1])
        last = index
    out.append(body[messages[-1][1] :])
    return b"".join(out)


_SEED_DIGEST = hashlib.blake2b(_SEED, digest_size=16).digest()


def _item(index: int, raw: bytes, said: Parsed, fingerprint: bytes, calls: tuple[Call, ...], call_name: str) -> Item:
    return Item(
        index=index,
        raw=raw,
        role=_ROLES.get(said.role, "other"),
        wire_role=said.role,
        fingerprint=fingerprint,
        text=said.text,
        parts=said.parts,
        calls=calls,
        call_name=call_name,
        media=said.media,
        hidden=said.hidden,
        error=said.error,
    )


# ---------------------------------------------------------------- one message


def _parsed(raw: bytes, memo: Memo) -> Parsed:
    known = memo.get(raw)
    if known is None:
        try:
            known = _parse(raw)
        except RecursionError:
            message = "a message nested too deeply"
            raise wire.Unreadable(message) from None
        memo.put(raw, known)
    return known


def _parse(raw: bytes) -> Parsed:
    spans = wire.object_spans(raw)
    fields = {key: wire.value_of(raw[start:end]) for key, (start, end) in spans.items() if key in _READ}
    role = fields.get("role")
    if not isinstance(role, str):
        message = "a message without a role"
        raise wire.Unreadable(message)
    content = fields.get("content")
    text, media, hidden = _content(content, raw, spans.get("content"))
    parts: list[Part] = []
    if "content" in spans and content is not None:
        start, end = spans["content"]
        parts.append(Part("content", start, end, text, listed=isinstance(content, list)))
    calls = _calls(raw, spans, fields, parts)
    for key in ("reasoning_content", "reasoning"):
        if isinstance(fields.get(key), str):
            hidden += fields[key]
    refusal = fields.get("refusal")
    if isinstance(refusal, str) and refusal:
        text = f"{text}\n{refusal}" if text else refusal
    answers = None
    if role == "tool":
        answers = fields["tool_call_id"] if isinstance(fields.get("tool_call_id"), str) else ""
    elif role == "function":
        answers = _LEGACY_CALL
    return Parsed(
        role=role,
        digest=_digest(role, fields, _exact_content(content, raw, spans.get("content")), calls),
        text=text,
        parts=tuple(parts),
        calls=tuple(calls),
        answers=answers,
        media=tuple(media),
        hidden=hidden,
        error=answers is not None and (fields.get("is_error") is True or _FAILED.match(text[:400]) is not None),
    )


_READ = frozenset(
    {"role", "content", "name", "refusal", "tool_calls", "tool_call_id", "function_call", "reasoning_content"}
    | {"reasoning", "is_error", "audio"}
)


def _content(content: Any, raw: bytes, span: wire.Span | None) -> tuple[str, list[Media], str]:
    """Readable text, media and hidden text of a content value."""
    if isinstance(content, str):
        return content, [], ""
    if content is None or span is None:
        return "", [], ""
    if not isinstance(content, list):
        message = "content that is neither a string nor a list"
        raise wire.Unreadable(message)
    texts: list[str] = []
    media: list[Media] = []
    hidden: list[str] = []
    places = wire.array_spans(raw[span[0] : span[1]])
    for part, (start, end) in zip(content, places, strict=True):
        kind = _kind(part)
        if isinstance(part, str):
            texts.append(part)
        elif kind in _HIDDEN_PARTS:
            hidden.append(_canonical_text(part))
        elif kind in _MEDIA_KINDS:
            url = part.get("image_url")
            url = url.get("url") if isinstance(url, dict) else url
            by_url = isinstance(url, str) and not url.startswith("data:")
            media.append(Media(_MEDIA_KINDS[kind], span[0] + start, span[0] + end, by_url=by_url))
        elif isinstance(part, dict):
            text = part.get("text", part.get("refusal"))
            texts.append(text if isinstance(text, str) else _canonical_text(part))
    return "\n".join(texts), media, "".join(hidden)


def _calls(raw: bytes, spans: Mapping[str, wire.Span], fields: Mapping[str, Any], parts: list[Part]) -> list[Call]:
    calls: list[Call] = []
    listed = fields.get("tool_calls")
    if listed is not None:
        if not isinstance(listed, list):
            message = "tool_calls that is not a list"
            raise wire.Unreadable(message)
        base, stop = spans["tool_calls"]
        for start, end in wire.array_spans(raw[base:stop]):
            calls.append(_call(raw, base + start, base + end, len(calls), parts))
    if isinstance(fields.get("function_call"), dict):
        start, end = spans["function_call"]
        name = fields["function_call"].get("name")
        arguments = _arguments(raw, start, end, f"call.{len(calls)}", parts)
        calls.append(Call(_LEGACY_CALL, name if isinstance(name, str) else "", arguments, f"call.{len(calls)}"))
    return calls


def _call(raw: bytes, start: int, end: int, at: int, parts: list[Part]) -> Call:
    spans = wire.object_spans(raw[start:end])
    call = wire.value_of(raw[start:end])
    kind = "custom" if isinstance(call.get("custom"), dict) else "function"
    inner = call.get(kind)
    if not isinstance(inner, dict):
        message = "a tool call without a function"
        raise wire.Unreadable(message)
    first, last = spans[kind]
    arguments = _arguments(raw, start + first, start + last, f"call.{at}", parts)
    name, call_id = inner.get("name"), call.get("id")
    return Call(
        call_id if isinstance(call_id, str) else "", name if isinstance(name, str) else "", arguments, f"call.{at}"
    )


def _arguments(raw: bytes, start: int, end: int, key: str, parts: list[Part]) -> str:
    """The arguments string of a call (``input`` of a custom tool), its place noted as a part."""
    spans = wire.object_spans(raw[start:end])
    for name in ("arguments", "input"):
        if name in spans:
            first, last = spans[name]
            value = wire.value_of(raw[start + first : start + last])
            if isinstance(value, str):
                parts.append(Part(key, start + first, start + last, value))
                return value
            return raw[start + first : start + last].decode("utf-8", "surrogatepass")
    return ""


# ---------------------------------------------------------------- what a message means


def _digest(role: str, fields: Mapping[str, Any], content: Any, calls: Sequence[Call]) -> bytes:
    """The canonical form of design section 5, hashed: role, name, content as parts, refusal, calls. No ids, no extras."""
    form: list[Any] = [role]
    name = fields.get("name")
    if role not in ("tool", "function") and isinstance(name, str) and name:
        form.append(["name", name])
    content = _canonical_content(content)
    if content:
        form.append(["content", content])
    for key in ("refusal", "audio"):
        if fields.get(key):
            form.append([key, fields[key]])
    if calls:
        listed = fields.get("tool_calls") or ()
        kinds = ["custom" if isinstance(call.get("custom"), dict) else "function" for call in listed]
        kinds += ["legacy"] * (len(calls) - len(kinds))
        said = [[kind, call.name, _canonical_json(call.arguments)] for kind, call in zip(kinds, calls, strict=True)]
        form.append(["calls", said])
    return hashlib.blake2b(_canonical_text(form).encode("ascii"), digest_size=16).digest()


def _exact_content(content: Any, raw: bytes, span: wire.Span | None) -> Any:
    """The content with its numbers exact, where it holds more than text."""
    if span is None or not isinstance(content, list) or all(_kind(part) == "text" for part in content):
        return content
    return _exact(raw[span[0] : span[1]].decode("utf-8", "surrogatepass"))


def _canonical_content(content: Any) -> list[Any]:
    """Parts; a string is one text part, and an empty one is none."""
    if content is None or isinstance(content, str):
        return [["text", content]] if content else []
    parts: list[Any] = []
    for part in content:
        if isinstance(part, str):
            parts.append(["text", part])
        elif isinstance(part, dict):
            kind = _kind(part)
            if kind in _HIDDEN_PARTS:
                continue
            if kind == "text" and isinstance(part.get("text"), str):
                parts.append(["text", part["text"]])
            else:
                parts.append(
                    {key: value for key, value in part.items() if key not in _DROPPED_KEYS and value is not None}
                )
        else:
            parts.append(["other", part])
    return [] if parts == [["text", ""]] else parts


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def _canonical_json(text: str) -> Any:
    """Arguments as parsed JSON where they parse, numbers by value at any size; else the text."""
    try:
        return ["json", _exact(text)]
    except (ValueError, RecursionError):
        return ["text", text]


def _exact(text: str) -> Any:
    """JSON with each number as an object of its own kind, which no object of the text can be."""
    return json.loads(
        text, parse_int=_number, parse_float=_number, parse_constant=_constant, object_pairs_hook=_no_number
    )


def _no_number(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {"\x00" + key if key.startswith("\x00") else key: value for key, value in pairs}


def _number(text: str) -> dict[str, str]:
    """A number by value, exact at any size: 1, 1.0 and 10e-1 are one number, 20 digits keep each digit."""
    try:
        sign, digits, exponent = Decimal(text).as_tuple()
    except InvalidOperation:
        return {"\x00number": text}
    kept = "".join(map(str, digits)).lstrip("0")
    short = kept.rstrip("0")
    shift = int(exponent) + len(kept) - len(short)
    return {"\x00number": f"{'-' if sign and short else ''}{short or '0'}e{shift if short else 0}"}


def _constant(text: str) -> dict[str, str]:
    return {"\x00number": text}


def _canonical_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


# ---------------------------------------------------------------- groups


def _grouped(
    body: Sequence[Parsed],
) -> tuple[tuple[Group, ...], tuple[int, ...], dict[int, tuple[int, int]], dict[tuple[int, int], int]]:
    """Partition messages into groups, and say which call each result answers.

    A result belongs to the nearest call before it with its id that nobody answered, else to the nearest one with its id
    (a pending answer, then the final one). Ids repeat in real sessions: nearness decides. Where a result does not stand
    directly behind its call and its siblings, the group reaches from the call to it and is not whole.
    """
    start_of = list(range(len(body)))
    ordinals: dict[int, tuple[int, int]] = {}
    answered: dict[tuple[int, int], int] = {}
    open_calls: dict[str, list[tuple[int, int]]] = {}
    all_calls: dict[str, tuple[int, int]] = {}
    broken: set[int] = set()
    for index, message in enumerate(body):
        for at, call in enumerate(message.calls):
            open_calls.setdefault(call.id, []).append((index, at))
            all_calls[call.id] = (index, at)
        if message.answers is None:
            continue
        owner = _owner(message.answers, open_calls, all_calls)
        if owner is None:
            broken.add(index)
            continue
        ordinals[index] = owner
        if owner in answered:
            broken.add(owner[0])
        answered.setdefault(owner, index)
        start_of[index] = owner[0]
    groups: list[Group] = []
    for index, start in enumerate(start_of):
        while groups and groups[-1].end > start:
            last = groups.pop()
            start = min(start, last.start)
        groups.append(Group(start, index + 1))
    finished = tuple(Group(group.start, group.end, _whole(group, body, answered, broken)) for group in groups)
    group_of = tuple(number for number, group in enumerate(finished) for _ in range(group.end - group.start))
    return finished, group_of, ordinals, answered


def _owner(
    call_id: str, open_calls: dict[str, list[tuple[int, int]]], all_calls: dict[str, tuple[int, int]]
) -> tuple[int, int] | None:
    waiting = open_calls.get(call_id)
    if not waiting:
        return all_calls.get(call_id)
    newest = waiting[-1][0]
    first = next(at for at, owner in enumerate(waiting) if owner[0] == newest)
    return waiting.pop(first)


def _whole(group: Group, body: Sequence[Parsed], answered: Mapping[tuple[int, int], int], broken: set[int]) -> bool:
    first = body[group.start]
    if any(index in broken for index in range(group.start, group.end)):
        return False
    if any((group.start, at) not in answered for at in range(len(first.calls))):
        return False
    return all(body[index].answers is not None for index in range(group.start + 1, group.end))


# ---------------------------------------------------------------- beside the messages


def _schemas(request: ChatRequest) -> tuple[str, ...]:
    spans = (request.fields.get(name) for name in ("tools", "functions", "response_format"))
    return tuple(request.body[span[0] : span[1]].decode("utf-8", "replace") for span in spans if span is not None)


def _tool_names(request: ChatRequest) -> frozenset[str]:
    names: set[str] = set()
    tools = request.field("tools")
    for tool in tools if isinstance(tools, list) else ():
        inner = tool.get("function", tool.get("custom")) if isinstance(tool, dict) else None
        if isinstance(inner, dict) and isinstance(inner.get("name"), str):
            names.add(inner["name"])
    return frozenset(names)


def _max_tokens(request: ChatRequest) -> int:
    for name in _OUTPUT_LIMITS:
        value = request.field(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
