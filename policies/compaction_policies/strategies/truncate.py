"""``truncate``: drop the oldest whole groups. Also the last resort above the hard limit, which alone may shorten the
largest results of the newest group, head and tail."""

from __future__ import annotations

from collections.abc import Callable

from compaction_policies.draft import Draft
from compaction_policies.frame import encode_json
from compaction_policies.policy import Truncate
from compaction_policies.record import Op
from compaction_policies.shorten import head_tail
from compaction_policies.transcript import Item, Part

_SHORTENED = "\n[... shortened to fit the context window ...]\n"
_LEAST_CHARS = 200


def truncate(draft: Draft, goal: int, synthetic: Callable[[Draft], int], strategy: Truncate) -> bool:
    """Drop groups from the oldest until the view is at most ``goal``; never the newest, never what is protected.

    Args:
        synthetic: what the synthetic message would count with the draft's dropped user messages carried.
    """
    safe = draft.protected(draft.newest, strategy.exclude_tools).kept
    if strategy.preserve_user_messages is not None and draft.summarize is None:
        draft.preserve = strategy.preserve_user_messages
    dropped = False
    tokens = draft.tokens()
    for group in draft.transcript.groups[:-1]:
        if tokens <= goal:
            break
        if group.start in draft.gone or group.start < draft.cut or group.start in safe:
            continue
        for index in range(group.start, group.end):
            draft.put(Op(index, "*", "drop"))
        items = draft.transcript.items[group.start : group.end]
        if any(item.role in ("user", "system") for item in items):
            draft.synthetic = synthetic(draft)
        tokens = draft.tokens() if draft.synthetic else tokens - sum(draft.sizes[group.start : group.end])
        dropped = True
    if dropped:
        draft.used.append(strategy.kind)
    return dropped


def shorten_newest(draft: Draft, goal: int) -> bool:
    """Shorten the largest tool results of a finished newest group until the view is at most ``goal``."""
    group = draft.transcript.groups[-1]
    if not group.whole:
        return False
    shortened = False
    results = [item for item in draft.transcript.items[group.start : group.end] if item.role == "tool"]
    lengths = {item.index: len(part.text) for item in results if (part := item.part("content")) is not None}
    while draft.tokens() > goal:
        index = max(lengths, key=lambda at: (lengths[at], -at), default=None)
        if index is None or lengths[index] <= _LEAST_CHARS:
            break
        lengths[index] = max(_LEAST_CHARS, lengths[index] // 2)
        item = draft.transcript.items[index]
        part = item.part("content")
        if part is not None and _shorten(draft, item, part, lengths[index]):
            shortened = True
    if shortened:
        draft.used.append("last-resort")
    return shortened


def _shorten(draft: Draft, item: Item, part: Part, chars: int) -> bool:
    text = head_tail(part.text, chars, _SHORTENED)
    value = encode_json([{"type": "text", "text": text}] if part.listed else text)
    if draft.gain(item, part, value) <= 0:
        return False
    draft.edit(item, part, "shorten", value)
    return True
