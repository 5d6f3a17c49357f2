"""``clear-old-tool-results``: old results become a placeholder, long strings in their calls' arguments a note. No model.

Oldest first, in one batch down to the target; nothing moves because one more result became old.
"""

from __future__ import annotations

from compaction_policies.draft import Draft
from compaction_policies.frame import cleared_placeholder, encode_json
from compaction_policies.policy import ClearOldToolResults, matches_tool
from compaction_policies.protect import excluded
from compaction_policies.shorten import shorten_strings
from compaction_policies.transcript import Item, Part

_LEAST_GAIN = 16
"""Tokens that one replacement must free to be worth its place."""


def clear(draft: Draft, strategy: ClearOldToolResults, *, keep_tool_uses: int | None = None, at_least: int) -> bool:
    """Clear until the target is met. Returns whether anything was cleared; below ``at_least`` tokens nothing is."""
    keep = strategy.keep_tool_uses if keep_tool_uses is None else keep_tool_uses
    moves: list[tuple[Item, Part, bytes]] = []
    freed = 0
    excess = draft.tokens() - draft.limits.target
    for item in _candidates(draft, strategy, keep):
        if freed >= excess:
            break
        for move in _moves(draft, strategy, item):
            gain = draft.gain(*move)
            if gain >= _LEAST_GAIN:
                moves.append(move)
                freed += gain
    if not moves or freed < at_least:
        return False
    for item, part, value in moves:
        draft.edit(item, part, "clear" if part.key == "content" else "shorten", value)
    draft.used.append(strategy.kind)
    return True


def _candidates(draft: Draft, strategy: ClearOldToolResults, keep: int) -> list[Item]:
    """Results that may be cleared, oldest first."""
    transcript = draft.transcript
    results = [item for item in transcript.items if item.role == "tool"]
    newest = {item.index for item in results[max(0, len(results) - keep) :]} if keep else set()
    near = _newest_tokens(draft, strategy.keep_tokens)
    patterns = (*draft.policy.exclude_tools, *strategy.exclude_tools)
    return [
        item
        for item in results
        if item.index < draft.newest
        and item.index not in newest
        and item.index < near
        and item.index not in draft.gone
        and transcript.group_at(item.index).whole
        and not excluded(item, patterns)
        and not (strategy.keep_errors and item.error)
    ]


def _newest_tokens(draft: Draft, keep_tokens: int) -> int:
    """Index from which on the newest ``keep_tokens`` tokens stand."""
    index, total = len(draft.sizes), 0
    while index > 0 and total + draft.sizes[index - 1] <= keep_tokens:
        index -= 1
        total += draft.sizes[index]
    return index


def _moves(draft: Draft, strategy: ClearOldToolResults, result: Item) -> list[tuple[Item, Part, bytes]]:
    moves: list[tuple[Item, Part, bytes]] = []
    content = result.part("content")
    if content is not None and draft.kind_at(result.index, "content") != "clear":
        moves.append((result, content, _placeholder(draft, strategy, result, content)))
    owner = draft.transcript.items[draft.transcript.group_at(result.index).start]
    call = next((call for call in owner.calls if call.result == result.index), None)
    if call is None or owner.role != "assistant" or not _clears_inputs(strategy, call.name):
        return moves
    arguments = owner.part(call.part)
    if arguments is not None and draft.kind_at(owner.index, call.part) == "keep":
        shorter = shorten_strings(arguments.text)
        if shorter is not None:
            moves.append((owner, arguments, encode_json(shorter)))
    return moves


def _clears_inputs(strategy: ClearOldToolResults, name: str) -> bool:
    wanted = strategy.clear_tool_inputs
    return wanted if isinstance(wanted, bool) else matches_tool(name, wanted)


def _placeholder(draft: Draft, strategy: ClearOldToolResults, result: Item, content: Part) -> bytes:
    original = result.raw[content.start : content.end]
    text = cleared_placeholder(
        result.call_name,
        draft.handle(original) if strategy.externalize else None,
        content.text[: strategy.preview_chars],
        callable_again=result.call_name in draft.transcript.tool_names,
    )
    return encode_json([{"type": "text", "text": text}] if content.listed else text)
