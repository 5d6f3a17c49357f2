"""``compaction-proxy init``: a starter configuration that explains itself."""

from __future__ import annotations

from pathlib import Path

import click

STARTER = """\
# compaction-proxy. Check it with `compaction-proxy check proxy.yaml`, run it with `compaction-proxy serve`.
# Every key with its default: docs/configuration.md. Completion in an editor: `compaction-proxy schema`.

providers:
  openai:
    baseUrl: https://api.openai.com/v1    # any OpenAI-compatible server: vLLM, llama.cpp, a gateway ...
    # apiKey: "${OPENAI_API_KEY}"         # without it the client's own key goes upstream

models:                                   # the first entry that matches the request's model is used
  # - {match: "my-model-*", provider: openai, policy: default, contextWindow: 32768}
  - {match: "*", provider: openai, policy: default}

policies:
  default:
    preset: balanced                      # balanced | coding-agent | support-chat | zero-llm
    mode: on                              # shadow: decide and report, but forward everything unchanged
    thresholds:
      thresholdTokens: 120000             # compact when the prompt is larger than this ...
      thresholdRatio: 0.75                # ... or than this share of the model's window, whichever is smaller
    # excludeTools: ["todo_*"]            # results that are never cleared
    # pins: {constraints: ["Never touch migrations/."]}

# store: {url: "redis://localhost:6379/0"}    # default: an embedded Valkey; memory:// keeps nothing on disk
"""


@click.command()
@click.argument("path", default="proxy.yaml", type=click.Path(path_type=Path))
def command(path: Path) -> None:
    """Write a commented starter configuration to PATH [default: proxy.yaml]; an existing file is left alone."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(STARTER)
    except FileExistsError:
        click.echo(f"{path} exists; give another name", err=True)
        raise SystemExit(1) from None
    except OSError as error:
        click.echo(f"{path} cannot be written: {error.strerror}", err=True)
        raise SystemExit(1) from None
    click.echo(f"wrote {path}; run it with: compaction-proxy serve --config {path}")
