"""Writes what follows from the configuration's schema: docs/configuration.md, config/proxy.yaml, the JSON Schema files.

python scripts/config_docs.py            write them
python scripts/config_docs.py --check    exit 1 if any is out of step
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from compaction_proxy.config import schema

ROOT = Path(__file__).resolve().parent.parent
INTRO = """\
# Configuration

One YAML file: `serve --config FILE`, else `$COMPACTION_PROXY_CONFIG`, else `./proxy.yaml`, else built-in (OpenAI as it is,
preset `balanced`, on 127.0.0.1:8787). `compaction-proxy init` writes a commented starter, `check` reports all problems at
once as `file:line:col: path: problem; did you mean ...`, `check --effective` prints merged policies with the origin of each
value, `schema` prints the JSON Schema for editors. [config/proxy.yaml](../config/proxy.yaml) has every key at its default.

- YAML 1.2: `yes`, `no`, `on`, `off` are strings; switches are `true` and `false`. An unknown key, a key twice and a wrong
  type are errors; nothing is converted.
- `${VAR}` and `${VAR:-default}` read the environment in any value, `$$` is a literal `$`. A variable that is not set and has
  no default is an error.
- A policy's `preset` (a shipped one, or another policy of yours; `balanced` if none is named) is its base: maps merge key by
  key, lists replace. The shipped presets can be named by `models` and `x-compaction-policy` without being defined.
- Absolute sizes in a policy are caps, scaled to the limit, so that a small window works as a large one.
- A changed file is re-read while the proxy runs (by content; also on SIGHUP); a broken one is reported and the one before
  stays in force. `server`, `store` and `telemetry` need a restart.

The keys that most people need stand first in each table, in bold.
"""


def fields(section: type[schema.Section]) -> list[tuple[str, FieldInfo]]:
    """Keys as YAML spells them, basic ones first."""
    listed = [(field.alias or name, field) for name, field in section.model_fields.items()]
    return sorted(listed, key=lambda pair: not extra(pair[1]).get("x-basic"))


def extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, schema.Section) or (value == [] and schema.children(field.annotation)):
        return ""
    if isinstance(value, dict):
        return "`{}`"
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value}`"


def kind_of(section: type[schema.Section]) -> str | None:
    found = section.model_fields.get("kind")
    if found is None or get_origin(found.annotation) is not Literal:
        return None
    return str(get_args(found.annotation)[0])


def reference() -> Iterator[str]:
    yield INTRO
    for section in schema.sections():
        title = section.place.replace("'", "`")
        yield f"\n## {title[0].upper()}{title[1:]}\n"
        doc = " ".join((section.__doc__ or "").split()) if "__doc__" in vars(section) else ""
        if doc and section.__doc__ is not schema.Section.__doc__:
            yield f"{doc}\n"
        yield "| key | default | unit | meaning |\n|---|---|---|---|"
        for name, field in fields(section):
            shown = f"**`{name}`**" if extra(field).get("x-basic") else f"`{name}`"
            meaning = " ".join((field.description or "").split()).replace("|", "\\|")
            yield f"| {shown} | {default(field).replace('|', chr(92) + '|')} | {extra(field).get('x-unit', '')} | {meaning} |"


def annotated() -> Iterator[str]:
    yield "# yaml-language-server: $schema=schema/proxy.schema.json"
    yield "# Every key of the configuration at its default, made from the schema (scripts/config_docs.py). It does the same as"
    yield "# no configuration at all. Copy what you want to change; config/minimal.yaml has five lines."
    yield ""
    yield from block("server", schema.Server, 0)
    yield "providers:"
    yield "  openai:                            # a name of yours"
    yield from keys(schema.Provider, 4, {"baseUrl": "https://api.openai.com/v1"})
    yield "models:                              # the first entry that matches the request's model is used"
    yield "  -"
    yield from keys(schema.Model, 4, {"match": '"*"', "provider": "openai", "policy": "default"})
    yield from block("store", schema.Store, 0)
    yield from block("telemetry", schema.Telemetry, 0)
    yield "policyFiles: []                      # globs, relative to this file; one policy per file, named by the file"
    yield "policies:"
    yield "  default:                           # a name of yours"
    yield from keys(schema.Policy, 4, {"preset": "balanced", "strategies": None})
    yield "    strategies:"
    for section in (schema.Clear, schema.Summarize):
        yield f"      - kind: {kind_of(section)}"
        yield from keys(section, 8, {"kind": None})


def block(name: str, section: type[schema.Section], indent: int) -> Iterator[str]:
    yield f"{' ' * indent}{name}:"
    yield from keys(section, indent + 2, {})


def keys(section: type[schema.Section], indent: int, given: dict[str, str | None]) -> Iterator[str]:
    """A section's keys with their defaults and meanings; ``given`` replaces a value, ``None`` leaves the key out."""
    for name, field in ((field.alias or name, field) for name, field in section.model_fields.items()):
        if name in given and given[name] is None:
            continue
        inner = schema.children(field.annotation)
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        if inner and isinstance(value, schema.Section) and name not in given:
            yield from block(name, inner[0], indent)
            continue
        text = given.get(name) or (json.dumps(value) if not isinstance(value, str) else value)
        pad = " " * indent
        meaning = " ".join((field.description or "").split())
        unit = extra(field).get("x-unit")
        comment = f"{meaning} [{unit}]" if unit else meaning
        yield from textwrap.wrap(comment, 118 - indent, initial_indent=f"{pad}# ", subsequent_indent=f"{pad}# ")
        yield f"{pad}{name}: {text}"


def outputs() -> dict[Path, str]:
    policy = json.dumps(schema.json_schema(policy=True), indent=2) + "\n"
    return {
        ROOT / "docs" / "configuration.md": "\n".join(reference()) + "\n",
        ROOT / "config" / "proxy.yaml": "\n".join(annotated()) + "\n",
        ROOT / "config" / "schema" / "proxy.schema.json": json.dumps(schema.json_schema(), indent=2) + "\n",
        ROOT / "config" / "schema" / "policy.schema.json": policy,
        ROOT / "policies" / "compaction_policies" / "presets" / "policy.schema.json": policy,
    }


def main() -> int:
    stale = [path for path, text in outputs().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        for path in stale:
            sys.stderr.write(f"{path.relative_to(ROOT)} is out of step with the schema: run scripts/config_docs.py\n")
        return bool(stale)
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(outputs()[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
