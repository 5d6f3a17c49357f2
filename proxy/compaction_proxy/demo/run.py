"""``compaction-proxy demo``: a real SDK client, the proxy, a scripted model; a table of what happens, request by request."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import openai
from rich.console import Console
from rich.live import Live
from rich.table import Table

from compaction_proxy.app import create_app
from compaction_proxy.config import Settings, load_settings
from compaction_proxy.demo.model import Model
from compaction_proxy.demo.script import ASKS, SYSTEM, TOOLS, run_tool
from compaction_proxy.serving import running
from compaction_proxy.tokens import Counters

CONFIG = """\
# the demonstration's whole configuration
store: {{url: "memory://"}}
providers:
  scripted: {{kind: openai, baseUrl: "{model}/v1"}}
models:
  - {{match: "*", provider: scripted, policy: demo}}
policies:
  demo:
    preset: coding-agent            # clear old tool results, then summarize; todo tools are left alone
    thresholds: {{thresholdTokens: 6000}}
"""

SHOWN_MESSAGES = 14


@dataclass(frozen=True, slots=True)
class Row:
    """One request: tokens that the client sent, tokens forwarded, and what the proxy said about it."""

    number: int
    sent: int
    forwarded: int
    cached: int
    said: str


@dataclass(slots=True)
class Run:
    rows: list[Row] = field(default_factory=list)
    sent: list[list[dict[str, Any]]] = field(default_factory=list)


def table(rows: list[Row], *, last: int | None = None) -> Table:
    drawn = Table(title="one coding task through the proxy (threshold: 6,000 tokens)", title_justify="left")
    for name in ("request", "client sent", "forwarded"):
        drawn.add_column(name, justify="right")
    drawn.add_column("outcome; reason")
    drawn.add_column("prefix kept", justify="right")
    for row in rows if last is None else rows[-last:]:
        style = "bold green" if row.said.startswith("compacted") else ""
        kept = f"{row.cached / row.forwarded:.0%}" if row.forwarded else ""
        drawn.add_row(str(row.number), f"{row.sent:,}", f"{row.forwarded:,}", row.said, kept, style=style)
    return drawn


async def demo(console: Console) -> int:
    """Run the demonstration; exit code 0 where a compaction happened and no request failed."""
    counters = Counters()
    count = (await counters.get("gpt-5")).count
    model = Model(count)
    run = Run()
    async with running(model.app()) as model_address:
        settings = settings_of(CONFIG.format(model=model_address))
        async with running(create_app(settings)) as proxy_address:
            console.print(f"A scripted model listens on {model_address}, the proxy on {proxy_address}.")
            console.print(f'The client is the openai SDK with base_url="{proxy_address}/v1"; nothing else changes.\n')
            client = openai.AsyncOpenAI(base_url=f"{proxy_address}/v1", api_key="no-key-needed", max_retries=0)
            with Live(table([]), console=console, refresh_per_second=20) as live:
                async for row in conversation(client, model, run):
                    run.rows.append(row)
                    live.update(table(run.rows, last=console.height - 6 if console.is_terminal else None))
                live.update(table(run.rows))
            await client.close()
    counters.close()
    report(console, model, run)
    return 0 if any(row.said.startswith("compacted") for row in run.rows) else 1


def settings_of(text: str) -> Settings:
    """The settings of a configuration that is no file yet."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "proxy.yaml"
        file.write_text(text, encoding="utf-8")
        return load_settings(file, {})


async def conversation(client: openai.AsyncOpenAI, model: Model, run: Run) -> AsyncIterator[Row]:
    """The agent's loop: ask, stream, run the tools, send everything again."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    number = 0
    for turn, ask in enumerate(ASKS):
        messages.append({"role": "user", "content": ask})
        while True:
            number += 1
            run.sent.append(list(messages))
            answer, said = await stream(client, messages)
            messages.append(answer)
            sent = sum(model.size(message) for message in run.sent[-1])
            yield Row(number, sent, model.prompt_tokens, model.cached_tokens, said)
            if not answer.get("tool_calls"):
                break
            for call in answer["tool_calls"]:
                result = run_tool(call["function"]["name"], call["function"]["arguments"], turn)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            await asyncio.sleep(0)


async def stream(client: openai.AsyncOpenAI, messages: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """One streamed answer, put together, and the proxy's word on the request."""
    raw = await client.chat.completions.with_raw_response.create(
        model="gpt-5",
        messages=messages,  # type: ignore[arg-type]
        tools=TOOLS,  # type: ignore[arg-type]
        stream=True,
    )
    text, calls = "", dict[int, dict[str, Any]]()
    async for chunk in cast(AsyncIterator[Any], raw.parse()):
        if not chunk.choices:
            continue
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for part in delta.tool_calls or ():
            call = calls.setdefault(
                part.index, {"id": part.id, "type": "function", "function": {"name": "", "arguments": ""}}
            )
            if part.function is not None:
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
    answer: dict[str, Any] = {"role": "assistant", "content": text or None}
    if calls:
        answer["tool_calls"] = [calls[at] for at in sorted(calls)]
    return answer, raw.headers.get("x-compaction", "").replace("; reason=", "; ")


def report(console: Console, model: Model, run: Run) -> None:
    """What was saved, and one compaction before and after."""
    sent, forwarded = sum(row.sent for row in run.rows), sum(row.forwarded for row in run.rows)
    cached = sum(row.cached for row in run.rows)
    events = [row for row in run.rows if row.said.startswith("compacted")]
    console.print(
        f"\n{len(run.rows)} requests, {len(events)} compactions, {model.summaries} summary calls. The client sent {sent:,} "
        f"tokens, {forwarded:,} were forwarded: [bold]{1 - forwarded / sent:.0%} saved[/bold]; {cached / forwarded:.0%} of those "
        "were a prefix that the provider had cached."
    )
    if not events:
        return
    at = max(events, key=lambda row: row.sent - row.forwarded).number - 1
    console.print(f"\n[bold]Request {at + 1}, as the client sent it[/bold] ({run.rows[at].sent:,} tokens)")
    console.print(outline(run.sent[at], console.width), markup=False, highlight=False)
    console.print(f"\n[bold]and as the model got it[/bold] ({run.rows[at].forwarded:,} tokens)")
    console.print(outline(model.forwarded[at], console.width), markup=False, highlight=False)


def outline(messages: list[dict[str, Any]], width: int) -> str:
    """A line a message, the middle of long arrays left out."""
    lines, room = [], max(40, min(100, width - 14))
    for message in messages:
        calls = [
            f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()
        ]
        said = " ".join(str(message.get("content") or " ".join(calls)).split())
        lines.append(f"  {message['role']:<9} {said if len(said) <= room else said[: room - 3] + '...'}")
    if len(lines) > SHOWN_MESSAGES:
        half = SHOWN_MESSAGES // 2
        lines[half:-half] = [f"  ... {len(lines) - 2 * half} more messages ..."]
    return "\n".join(lines)
