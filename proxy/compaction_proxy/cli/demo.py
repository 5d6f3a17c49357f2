"""``compaction-proxy demo``: see a long agent conversation being compacted. No key, no network."""

from __future__ import annotations

import asyncio

import click
from rich.console import Console


@click.command()
def command() -> None:
    """Run a scripted model, the proxy and a real openai SDK client, and show what happens."""
    try:
        from compaction_proxy.demo.run import demo
    except ModuleNotFoundError as error:
        if error.name != "openai":
            raise
        message = "the demonstration needs the openai SDK: pip install 'compaction-proxy[demo]'"
        raise click.ClickException(message) from None
    raise SystemExit(asyncio.run(demo(Console())))
