"""``compaction-proxy schema``: the configuration's JSON Schema, for completion and checks in editors."""

from __future__ import annotations

import json

import click

from compaction_proxy.config.schema import json_schema


@click.command()
@click.option("--policy", is_flag=True, help="The schema of a single policy file instead of proxy.yaml.")
def command(policy: bool) -> None:
    """Print the JSON Schema of proxy.yaml.

    Save it, and put `# yaml-language-server: $schema=FILE` into the first line of the YAML file.
    """
    click.echo(json.dumps(json_schema(policy), indent=2))
