"""A scripted model behind an OpenAI-compatible address: it streams tool calls and answers, and writes summaries.

It counts what it is sent, and simulates a provider's prompt cache: the leading messages that the last request also had.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from compaction_proxy.demo.script import ASKS, SUMMARY, Step, steps


@dataclass(slots=True)
class Model:
    """The model's memory of one conversation.

    Args:
        count: tokens of a text.
        forwarded: the arrays that reached it, summaries left out.
    """

    count: Callable[[str], int]
    forwarded: list[list[dict[str, Any]]] = field(default_factory=list)
    summaries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    _script: Iterator[Step] = field(default_factory=lambda: (step for turn in range(len(ASKS)) for step in steps(turn)))

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        messages = body["messages"]
        if not body.get("tools"):
            self.summaries += 1
            return JSONResponse(_answer(body["model"], SUMMARY, sum(map(self.size, messages)), self.count(SUMMARY)))
        self._see(messages)
        return StreamingResponse(self._stream(body["model"], next(self._script)), media_type="text/event-stream")

    def _see(self, messages: list[dict[str, Any]]) -> None:
        """Bill the request as a provider with a prompt cache would."""
        last = self.forwarded[-1] if self.forwarded else []
        same = 0
        while same < min(len(last), len(messages)) and last[same] == messages[same]:
            same += 1
        self.cached_tokens = sum(map(self.size, messages[:same]))
        self.prompt_tokens = sum(map(self.size, messages))
        self.forwarded.append(messages)

    def size(self, message: Mapping[str, Any]) -> int:
        return (
            4
            + self.count(json.dumps(message.get("content") or "", ensure_ascii=False))
            + sum(
                self.count(call["function"]["name"] + call["function"]["arguments"])
                for call in message.get("tool_calls") or ()
            )
        )

    async def _stream(self, model: str, step: Step) -> AsyncIterator[bytes]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": step.text or None}]
        if step.tool:
            call = {"index": 0, "id": f"call_{len(self.forwarded)}", "type": "function"}
            deltas = [{"role": "assistant", "tool_calls": [{**call, "function": {"name": step.tool, "arguments": ""}}]}]
            half = len(step.arguments) // 2
            for piece in (step.arguments[:half], step.arguments[half:]):
                deltas.append({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
        for delta in deltas:
            yield _event(_chunk(model, delta, None))
        yield _event(_chunk(model, {}, "tool_calls" if step.tool else "stop"))
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.count(step.text + step.arguments),
            "total_tokens": self.prompt_tokens + self.count(step.text + step.arguments),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        yield _event({**_chunk(model, {}, None), "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def _chunk(model: str, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "chatcmpl-demo", "object": "chat.completion.chunk", "created": 0, "model": model, "choices": [choice]}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def _answer(model: str, text: str, tokens_in: int, tokens_out: int) -> dict[str, Any]:
    return {
        "id": "chatcmpl-demo",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": tokens_in, "completion_tokens": tokens_out, "total_tokens": tokens_in + tokens_out},
    }
