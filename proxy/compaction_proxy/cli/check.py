"""``compaction-proxy check``: everything that is wrong with configuration files, at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from compaction_proxy.catalogue import Catalogue
from compaction_proxy.config import ConfigError, Mark, process_environment, schema
from compaction_proxy.config.advise import never_fires
from compaction_proxy.config.load import Configuration, Source, read_source
from compaction_proxy.config.nodes import Map, Node, Scalar, Sequence, core_value
from compaction_proxy.config.resolve import Resolved, Written, resolve


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option(
    "--effective", is_flag=True, help="Print each policy as it is after merging, with the origin of each value."
)
def command(files: tuple[Path, ...], effective: bool) -> None:
    """Check configuration files, or single policy files.

    Exit code 0: usable (warnings may be printed); 2: not usable, with every problem on a line of its own.
    """
    environment = process_environment()
    code = 0
    for file in files:
        try:
            policies, warnings = read(file, environment)
        except ConfigError as error:
            for problem in error.problems:
                click.echo(str(problem), err=True)
            code = 2
            continue
        for warning in warnings:
            click.echo(f"warning: {warning}", err=True)
        if effective:
            for line in show(policies):
                click.echo(line)
        else:
            click.echo(f"{file}: ok ({len(policies)} {'policy' if len(policies) == 1 else 'policies'})")
    raise SystemExit(code)


def read(file: Path, environment: Mapping[str, str]) -> tuple[dict[str, Resolved], list[str]]:
    """The policies that a file defines, resolved, and what is odd about it. Raises :class:`ConfigError`."""
    source = read_source(file, environment)
    if source.tree is not None and is_policy(source.tree):
        return _policy(file, source, source.tree)
    configuration = Configuration(file, environment)
    settings = configuration.settings()
    catalogue = Catalogue()
    catalogue.load_now()
    odd = [*settings.warnings, *map(str, never_fires(settings, Mark(str(file)), catalogue.context_window))]
    found = configuration.resolution.policies
    return {name: found[name] for name in configuration.written}, odd


def is_policy(tree: Map) -> bool:
    """A file with keys of a policy and none of a whole configuration."""
    whole = {field.alias or name for name, field in schema.Proxy.model_fields.items()}
    own = {field.alias or name for name, field in schema.Policy.model_fields.items()}
    return not whole & set(tree.entries) and bool(own & set(tree.entries))


def _policy(file: Path, source: Source, tree: Map) -> tuple[dict[str, Resolved], list[str]]:
    model, problems = source.check(schema.Policy)
    resolution = resolve({file.stem: Written(file.stem, tree, "", tree.mark, model is not None)})
    wrong = [*problems, *resolution.problems]
    if wrong:
        raise ConfigError(wrong)
    return {file.stem: resolution.policies[file.stem]}, [str(warning) for warning in resolution.warnings]


def show(policies: Mapping[str, Resolved]) -> Iterator[str]:
    """Each policy as YAML, a comment with the origin behind each value."""
    for name, resolved in policies.items():
        yield f"{name}:  # revision {resolved.policy.revision}"
        values = resolved.model.model_dump(by_alias=True, mode="json")
        yield from _lines(values, resolved.tree, "  ")


def _lines(values: Mapping[str, Any], tree: Node | None, indent: str) -> Iterator[str]:
    for key, value in values.items():
        node = tree.entries[key].node if isinstance(tree, Map) and key in tree.entries else None
        if isinstance(value, dict) and not isinstance(node, Scalar):
            yield f"{indent}{key}:"
            yield from _lines(value, node, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{indent}{key}:"
            items = node.items if isinstance(node, Sequence) else ()
            for at, item in enumerate(value):
                first, *rest = _lines(item, items[at] if at < len(items) else None, indent + "    ")
                yield f"{indent}  - {first.strip()}"
                yield from rest
        else:
            yield f"{indent}{key}: {_scalar(value)}  # {node.mark if node is not None else 'default'}"


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(_quoted(item) for item in value)}]"
    return _quoted(value) if isinstance(value, str) else str(value)


def _quoted(value: Any) -> str:
    text = str(value)
    plain = text.replace("-", "").replace("_", "").isalnum() and text[0].isalpha() and core_value(text) == text
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
