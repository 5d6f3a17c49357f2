"""Fulfils a plan's need with a model: private, non-streaming calls built from the policy alone.

A failure is a value. Each call is tried at most twice: once more after a passing error (with jitter), or with a shorter
demand after an answer that was too long; 401, 403 and 404 are final. At most four calls a summary, under one deadline.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from compaction_policies.accept import Accepted, accept
from compaction_policies.digest import digest
from compaction_policies.plan import Need, Summary
from compaction_policies.prompts import merge_messages, summary_messages
from compaction_proxy.compaction import Failed

DEFAULT_INPUT_CHARS = 96_000
CHARS_PER_TOKEN = 2.5
INPUT_SHARE = 0.8
REASONING_TOKENS = 8_000
"""Room for hidden reasoning beside the summary: such models count it against their output limit (OpenAI, 2025)."""
_FINAL = frozenset({400, 401, 403, 404, 405, 413, 422})
_REASONS = re.compile(r"(?:^|/)(?:o\d|gpt-5|gpt-[6-9])", re.IGNORECASE)
_WANTS_OTHER_LIMIT = re.compile(rb"max_completion_tokens|max_tokens")
_RETRY_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Reply:
    """An upstream's whole answer to a private call; ``status`` 0 where none came."""

    status: int
    body: bytes
    why: str = ""


class Route(Protocol):
    """Where a summarizer's calls go. ``send`` raises nothing: what went wrong is in the reply."""

    @property
    def model(self) -> str: ...

    async def send(self, body: Mapping[str, Any], timeout_seconds: float) -> Reply: ...


@dataclass(slots=True)
class ModelSummarizer:
    """Summarizes with one model for one request.

    Args:
        route: the model's provider, with the credential that this job may use.
        constraints: pinned lines, which stand beside the summary and need no place in it.
        window: the summarizer's context window in tokens, where known.
    """

    route: Route
    constraints: Sequence[str] = ()
    window: int | None = None
    _usage: list[int] = field(default_factory=lambda: [0, 0])

    async def write(self, need: Need) -> Summary | Failed:
        strategy = need.strategy
        seconds = strategy.summarizer_timeout_ms / 1000
        budget = strategy.summarizer_input_char_budget or self._input_chars(need.max_tokens)
        chunks = digest(need.items, budget).chunks
        if not chunks:
            return Failed("nothing to summarize")
        texts: list[str] = []
        for number, chunk in enumerate(chunks, 1):
            part = (number, len(chunks)) if len(chunks) > 1 else None
            previous = need.anchor if part is None else ""

            def messages(shorter: bool, chunk: str = chunk, part: Any = part, previous: str = previous) -> Any:
                return summary_messages(
                    chunk,
                    previous=previous,
                    constraints=self.constraints,
                    max_tokens=need.max_tokens,
                    part=part,
                    shorter=shorter,
                    template=strategy.template_name,
                )

            text = await self._text(messages, need, seconds)
            if isinstance(text, Failed):
                return text
            texts.append(text)
        if len(texts) > 1:

            def merged(shorter: bool) -> Any:
                return merge_messages(
                    texts,
                    previous=need.anchor,
                    constraints=self.constraints,
                    max_tokens=need.max_tokens,
                    shorter=shorter,
                    template=strategy.template_name,
                )

            text = await self._text(merged, need, seconds)
            if isinstance(text, Failed):
                return text
            texts = [text]
        return Summary(texts[0], self.route.model, self._usage[0], self._usage[1])

    def _input_chars(self, output_tokens: int) -> int:
        if self.window is None:
            return DEFAULT_INPUT_CHARS
        return max(4_000, int(CHARS_PER_TOKEN * INPUT_SHARE * (self.window - output_tokens)))

    async def _text(self, messages: Callable[[bool], Any], need: Need, seconds: float) -> str | Failed:
        """One accepted text, from at most two calls."""
        shorter = False
        why = ""
        for attempt in (1, 2):
            reply = await self._call(messages(shorter), need.max_tokens, seconds)
            if reply.status != 200:
                why = reply.why or f"status {reply.status}"
                if attempt == 2 or reply.status in _FINAL:
                    break
                await asyncio.sleep(_RETRY_SECONDS * (1 + random.random()))
                continue
            answer = accept(_json(reply.body), need.count, need.max_tokens, last=attempt == 2)
            if isinstance(answer, Accepted):
                return answer.text
            why = answer.why
            if not answer.retry:
                break
            shorter = True
        return Failed(why)

    async def _call(self, messages: Any, max_tokens: int, seconds: float) -> Reply:
        """One private call. A server that names its output limit otherwise is asked once more with the other name."""
        reasons = _REASONS.search(self.route.model) is not None
        names = ["max_completion_tokens", "max_tokens"] if reasons else ["max_tokens", "max_completion_tokens"]
        reply = Reply(0, b"", "no call")
        for name in names:
            room = max_tokens + REASONING_TOKENS if name == "max_completion_tokens" else max_tokens
            body = {"model": self.route.model, "messages": messages, name: room}
            reply = await self.route.send(body, seconds)
            if reply.status != 400 or not _WANTS_OTHER_LIMIT.search(reply.body):
                break
        self._book(reply)
        return reply

    def _book(self, reply: Reply) -> None:
        usage = _json(reply.body)
        usage = usage.get("usage") if isinstance(usage, dict) else None
        if isinstance(usage, dict):
            for at, name in enumerate(("prompt_tokens", "completion_tokens")):
                value = usage.get(name)
                self._usage[at] += value if isinstance(value, int) and value > 0 else 0


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
