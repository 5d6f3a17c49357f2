"""The real shaper on a memory store, driven by arrays: one place to say what a client sends and see what goes upstream."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from compaction_policies.measure import Units
from compaction_policies.plan import Need, Summary
from compaction_policies.policy import ClearOldToolResults, Policy, SummarizeOldPreserveRecent, Thresholds
from compaction_policies.record import Record
from compaction_policies.succession import follows
from compaction_proxy.compaction import Compactor, Failed, Result
from compaction_proxy.jobs import Jobs
from compaction_proxy.shaping import Conversation, Shaped, Shaper
from compaction_proxy.store import MemoryStore, Records, Store
from compaction_proxy.tokens import Counters

MARK = re.compile(r"m\d+m")
Message = dict[str, Any]


def words(number: int, tokens: int) -> str:
    """A text of about so many tokens (characters / 4) that names itself: ``m7m``."""
    text = f"m{number}m " + "lorem ipsum dolor sit amet " * (tokens // 6 + 1)
    return text[: max(6, tokens * 4)]


def user(number: int, tokens: int = 20) -> Message:
    return {"role": "user", "content": words(number, tokens)}


def assistant(number: int, tokens: int = 20) -> Message:
    return {"role": "assistant", "content": words(number, tokens)}


def step(number: int, tokens: int = 100, *, tool: str = "read", count: int = 1, arguments: str = "{}") -> list[Message]:
    """A tool call and its result; ``count`` parallel ones."""
    calls = [
        {"id": f"c{number}-{at}", "type": "function", "function": {"name": tool, "arguments": arguments}}
        for at in range(count)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": words(number * 100 + at, tokens)}
        for at, call in enumerate(calls)
    ]
    return [{"role": "assistant", "content": None, "tool_calls": calls}, *results]


def loop(first: int, steps: int, tokens: int = 100, **more: Any) -> list[Message]:
    return [message for number in range(first, first + steps) for message in step(number, tokens, **more)]


def turns(first: int, count: int, tokens: int = 20) -> list[Message]:
    return [
        message for n in range(first, first + 2 * count, 2) for message in (user(n, tokens), assistant(n + 1, tokens))
    ]


SUMMARIZE_ONLY = (SummarizeOldPreserveRecent(preserve_recent_tokens=400, preserve_recent_turns=0, ledger=False),)
CLEAR_ONLY = (ClearOldToolResults(clear_at_least=100),)


def make_policy(limit: int = 1_000, strategies: tuple[Any, ...] = SUMMARIZE_ONLY, **more: Any) -> Policy:
    return Policy(
        "p", thresholds=Thresholds(threshold_tokens=limit, threshold_ratio=None), strategies=strategies, **more
    )


@dataclass(slots=True)
class Scribe:
    """A summarizer that names every message it was told of. ``fails`` makes it fail; ``before`` runs before it answers."""

    fails: bool = False
    needs: list[Need] = field(default_factory=list)
    before: Callable[[], Awaitable[None]] | None = None

    async def write(self, need: Need) -> Summary | Failed:
        self.needs.append(need)
        if self.before is not None:
            await self.before()
        if self.fails:
            return Failed("status 500")
        told = MARK.findall(" ".join([need.anchor, *(item.text for item in need.items)]))
        return Summary("## State\n" + " ".join(dict.fromkeys(told)), "scribe")


@dataclass(frozen=True, slots=True)
class Sent:
    """What a request became."""

    messages: list[Message]
    shaped: Shaped

    @property
    def record(self) -> Record:
        assert self.shaped.record is not None
        return self.shaped.record

    @property
    def event(self) -> bool:
        return self.shaped.event

    @property
    def marks(self) -> set[str]:
        return set(MARK.findall(json.dumps(self.messages)))

    def told(self, number: int) -> bool:
        return f"m{number}m" in self.marks


class Bench:
    """See the module docstring. Each call to :meth:`replica` is another process on the same store."""

    def __init__(self, policy: Policy | None = None, store: Store | None = None) -> None:
        self.policy = policy or make_policy()
        self.store = MemoryStore() if store is None else store
        self.scribe = Scribe()
        self.shaper = self.replica()

    def replica(self) -> Shaper:
        records = Records(
            self.store,
            ttl_seconds=3600,
            originals_ttl_seconds=600,
            keep_originals=True,
            clock_ms=lambda: 0,
            follows=follows,
        )
        jobs: Jobs[Result] = Jobs(lambda error: None)

        async def threads(work: Callable[[], Any]) -> Any:
            return work()

        compactor = Compactor(records, jobs, threads)
        return Shaper(records, Counters(by_characters=True), compactor, jobs, lambda count: Units(count, call=0))

    async def send(
        self,
        messages: list[Message],
        *,
        policy: Policy | None = None,
        shaper: Shaper | None = None,
        window: int | None = None,
        force: bool = False,
        session: str | None = "s",
        **fields: Any,
    ) -> Sent:
        body = json.dumps({"model": "m", "messages": messages, "pad": "x" * 1_024, **fields}).encode()
        shaped = await (shaper or self.shaper).shape(
            Conversation(
                body=body,
                model="m",
                policy=policy or self.policy,
                force=force,
                tenant="t",
                session=session,
                window=window,
                tenant_secret=b"k",
                summarizer=self.scribe,
            )
        )
        assert shaped.reason not in ("internal-error", "invariant-failed"), shaped
        forwarded = json.loads(shaped.body)["messages"] if shaped.body is not None else messages
        return Sent(forwarded, shaped)
