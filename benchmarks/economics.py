"""Economics and fidelity of the shipped presets on real agent conversations, through the real proxy over HTTP.

    python -m benchmarks.economics [--corpus DIR] [--trigger 30000] [--preset balanced ...] [--tiktoken]

Every conversation is replayed request by request, as its client sent it; a recording upstream keeps what the proxy
forwards; :mod:`benchmarks.replay_sim` bills it under each provider's cache rule and measures what survived. Trigger, peak
and bill have one unit: characters / 4, and 4 a message. The summarizer's stand-in writes 1,500 tokens that hold no entity
(the worst case for recall), billed at 5x. Exit code 1 where a preset misses a bar.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from benchmarks import replay_sim
from compaction_policies.measure import Units
from compaction_proxy.app import create_app
from compaction_proxy.demo.run import settings_of
from compaction_proxy.serving import running
from compaction_proxy.tokens import Counters

CORPUS = Path(__file__).resolve().parent.parent.parent / "shared" / "corpus"
STAND_IN = ("The work went on as planned and the next part of it was begun. " * 200)[: 1_500 * 4]
BARS = {"gpt-5": 0.46, "claude": 0.48, "recall": 0.95, "user": 1.0, "bad": 0, "peak": 1.1}
CONFIG = """\
store: {{url: "memory://"}}
providers:
  upstream: {{kind: openai, baseUrl: "{upstream}/v1"}}
models:
  - {{match: "*", provider: upstream, policy: measured}}
policies:
  measured:
    preset: {preset}
    thresholds: {{thresholdTokens: {trigger}, thresholdRatio: null}}
"""


@dataclass(slots=True)
class Recorder:
    """An upstream that keeps every array it is sent; a request without a mark is a summary call."""

    arrays: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    pending: collections.Counter[str] = field(default_factory=collections.Counter)
    calls: int = 0

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        mark = body.get("user", "")
        text = "ok"
        if "|" in mark:
            name, at = mark.rsplit("|", 1)
            self.arrays[name, int(at)] = {
                "messages": body["messages"],
                "summarizer_in": self.pending["in"],
                "summarizer_out": self.pending["out"],
            }
            self.pending.clear()
        else:
            text = STAND_IN
            self.calls += 1
            self.pending["in"] += sum(len(message["content"]) // 4 + 4 for message in body["messages"])
            self.pending["out"] += len(text) // 4
        message = {"role": "assistant", "content": text}
        return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


async def capture(preset: str, trigger: int, conversations: list[dict[str, Any]], *, tiktoken: bool) -> Recorder:
    """Drive the proxy with every request of every conversation, in order."""
    recorder = Recorder()
    units = Units if tiktoken else characters
    counters = Counters(by_characters=not tiktoken)
    async with running(recorder.app()) as upstream:
        settings = settings_of(CONFIG.format(upstream=upstream, preset=preset, trigger=trigger))
        async with (
            running(create_app(settings, counters=counters, units=units)) as proxy,
            aiohttp.ClientSession() as client,
        ):
            for conversation in conversations:
                await replay(client, proxy, conversation)
    return recorder


def characters(count: Any) -> Units:
    """Characters / 4, and 4 a message: the unit of the bill."""
    return Units(count, message=4, call=0)


async def replay(client: aiohttp.ClientSession, proxy: str, conversation: dict[str, Any]) -> None:
    messages = conversation["messages"]
    for at, message in enumerate(messages):
        if message["role"] != "assistant" or at == 0:
            continue
        body = {"model": "mock-model", "messages": messages[:at], "user": f"{conversation['id']}|{at}"}
        if conversation.get("tools"):
            body["tools"] = conversation["tools"]
        async with client.post(
            f"{proxy}/v1/chat/completions", json=body, headers={"x-session-id": conversation["id"]}
        ) as reply:
            await reply.read()
            if reply.status != 200:
                message_ = f"{conversation['id']} at {at}: status {reply.status}"
                raise RuntimeError(message_)


def score(recorder: Recorder, conversations: list[dict[str, Any]], trigger: int) -> dict[str, float]:
    """The replay's figures: cost as a multiple of no compaction, recall, user text kept, invalid arrays, peak."""
    index = replay_sim.Index()
    arguments = types.SimpleNamespace()
    base: collections.Counter[Any] = collections.Counter()
    ours: collections.Counter[Any] = collections.Counter()
    over_peak = 0.0
    for conversation in conversations:
        name = conversation["id"]
        captured = {
            at: (entry["messages"], None, entry["summarizer_in"], entry["summarizer_out"])
            for (owner, at), entry in recorder.arrays.items()
            if owner == name
        }
        replay_sim.add(
            base,
            replay_sim.replay(
                conversation, lambda: replay_sim.Policy(arguments), replay_sim.providers(), index, fid=False
            ),
        )
        replay_sim.add(
            ours, replay_sim.replay(conversation, lambda found=captured: found, replay_sim.providers(), index)
        )
        over_peak = max(over_peak, peak_ratio(conversation, captured, trigger))
    result = {
        name: (ours[name, "cost"] + ours["sum_in"] + 5 * ours["sum_out"]) / base[name, "cost"]
        for name in replay_sim.NAMES
    }
    result["recall"] = ours["got_c"] / max(1, ours["want_c"])
    result["user"] = ours["user_kept"] / max(1, ours["user"])
    result["bad"] = ours["bad"]
    result["peak"] = over_peak
    result["calls"] = recorder.calls
    result["tokens"] = ours["no-cache", "in"] / base["no-cache", "in"]
    return result


def peak_ratio(conversation: dict[str, Any], captured: dict[int, Any], trigger: int) -> float:
    """The largest forwarded array as a multiple of the trigger; 1.1 stands for the largest newest group so far + 5,000
    where that is more: such a group cannot be touched while it is the newest."""
    messages = conversation["messages"]
    head = replay_sim.ntok(json.dumps(conversation["tools"], ensure_ascii=False)) if conversation.get("tools") else 0
    worst, largest = 0.0, 0
    for at in sorted(captured):
        group = at - 1
        while group > 0 and messages[group]["role"] == "tool":
            group -= 1
        largest = max(largest, head + replay_sim.total(messages[group:at]))
        bar = max(BARS["peak"] * trigger, largest + 5_000)
        worst = max(worst, (head + replay_sim.total(captured[at][0])) / bar * BARS["peak"])
    return worst


def missed(result: dict[str, float]) -> list[str]:
    """The bars that a result misses."""
    lower = [name for name in ("gpt-5", "claude", "bad", "peak") if result[name] > BARS[name] + 1e-9]
    upper = [name for name in ("recall", "user") if result[name] < BARS[name] - 1e-9]
    return [*lower, *upper]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--trigger", type=int, default=30_000)
    parser.add_argument("--preset", nargs="*", default=["balanced", "coding-agent"])
    parser.add_argument(
        "--tiktoken", action="store_true", help="count with the o200k vocabulary instead; no bars apply"
    )
    given = parser.parse_args()
    if not (given.corpus / "conversations.jsonl").exists():
        print(f"skipped: no corpus at {given.corpus}")
        return 0
    conversations = replay_sim.load([str(given.corpus)], 0)
    code = 0
    names = [
        "gpt-5",
        "gpt-5.6",
        "claude",
        "claude-5.5",
        "gpt-4o",
        "no-cache",
        "tokens",
        "recall",
        "user",
        "bad",
        "peak",
        "calls",
    ]
    print("| preset | " + " | ".join(names) + " |\n|---|" + "--:|" * len(names))
    for preset in given.preset:
        recorder = asyncio.run(capture(preset, given.trigger, conversations, tiktoken=given.tiktoken))
        result = score(recorder, conversations, given.trigger)
        print(f"| {preset} | " + " | ".join(f"{result[name]:.3f}".rstrip("0").rstrip(".") for name in names) + " |")
        if not given.tiktoken and (wrong := missed(result)):
            print(f"{preset}: misses {', '.join(wrong)} (bars: {BARS})")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
