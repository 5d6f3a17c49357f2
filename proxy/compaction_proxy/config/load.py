"""From files to :class:`Settings`: reads the configuration and its policy files, finds every problem before it gives up.

References are checked on the YAML tree, so that a problem in one section hides none in another.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from compaction_proxy.config import schema
from compaction_proxy.config.advise import advise
from compaction_proxy.config.nodes import Map, Node, Scalar, Sequence, expand, parse
from compaction_proxy.config.report import ConfigError, Mark, Problem, Sources, did_you_mean, join, ordered
from compaction_proxy.config.resolve import Resolution, Written, resolve, shipped_presets
from compaction_proxy.config.settings import (
    ClientKey,
    ProviderSettings,
    RouteSettings,
    Secret,
    ServerSettings,
    Settings,
    StoreSettings,
    TelemetrySettings,
    Timeouts,
    match_route,
    open_relay,
)
from compaction_proxy.config.validate import mark_of, text_at, validate

S = TypeVar("S", bound=schema.Section)

BUILT_IN = "built-in"
DEFAULT_PROVIDER = schema.Provider.model_validate({"baseUrl": "https://api.openai.com/v1"})
DEFAULT_POLICY = "default"
FALLBACK_POLICY = "balanced"


def load_settings(path: Path | None, env: Mapping[str, str]) -> Settings:
    """Read a configuration.

    Args:
        path: ``proxy.yaml``; ``None`` = the built-in one: OpenAI as it is, ``balanced``, on loopback.
        env: where ``${VAR}`` is looked up.

    Raises:
        ConfigError: with all problems of all files.
    """
    return Configuration(path, env).settings()


def with_address(settings: Settings, host: str | None = None, port: int | None = None) -> Settings:
    """The settings on another address (``serve --host --port``).

    Raises:
        ConfigError: if strangers could then use a provider's key.
    """
    server = replace(
        settings.server,
        host=settings.server.host if host is None else host,
        port=settings.server.port if port is None else port,
    )
    if why := open_relay(server, settings.providers):
        raise ConfigError([Problem(Mark("--host"), "", why)], settings.sources)
    return replace(settings, server=server, address=(host, port))


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its tree with ``${VAR}`` resolved (``None`` if it is none), its problems of form, its content's digest."""

    tree: Map | None
    problems: tuple[Problem, ...]
    digest: str

    def check(self, section: type[S]) -> tuple[S | None, tuple[Problem, ...]]:
        """The section that the tree is, and all problems; an unset variable is not also a wrong type."""
        if self.tree is None:
            return None, self.problems
        value, found = validate(section, self.tree)
        marks = {problem.mark for problem in self.problems}
        return value, (*self.problems, *(problem for problem in found if problem.mark not in marks))


def read_source(path: Path, env: Mapping[str, str]) -> Source:
    """Read one file."""
    name = str(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        return Source(None, (Problem(Mark(name), "", f"cannot be read: {error.strerror or error}"),), "")
    node, problems = parse(data, name)
    if node is not None:
        node, unset = expand(node, env)
        problems += unset
        if not isinstance(node, Map):
            problems += (Problem(node.mark, "", "expected a mapping of keys at the top"),)
    return Source(node if isinstance(node, Map) else None, problems, digest(data))


def digest(content: bytes) -> str:
    """What tells a file's content from another."""
    return hashlib.sha256(content).hexdigest()


class Configuration:
    """One reading of a configuration: what was read, what is wrong with it, and what it resolves to."""

    def __init__(self, path: Path | None, env: Mapping[str, str]) -> None:
        self.env = env
        self.folder = path.parent if path else Path()
        self.root = Map(Mark(BUILT_IN), {})
        self.digests: dict[Path, str] = {}
        self.patterns: list[str] = []
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.model: schema.Proxy | None = schema.Proxy()
        if path is not None:
            self._read(path)
        self.written = {policy.name: policy for policy in self._policies()}
        self.resolution: Resolution = resolve(self.written)
        self.problems += self.resolution.problems
        self.warnings += self.resolution.warnings
        self.problems += self._references()

    @property
    def sources(self) -> Sources:
        """What has been read so far."""
        return Sources(MappingProxyType(self.digests), self.folder, tuple(self.patterns))

    def settings(self) -> Settings:
        """The settings.

        Raises:
            ConfigError: if anything is wrong.
        """
        if not self.problems and self.model is not None:
            settings = self._build(self.model)
            self.problems += self._after(settings)
            if not self.problems:
                odd = [*self.warnings, *advise(settings, self.root.mark)]
                return replace(settings, warnings=tuple(str(warning) for warning in ordered(odd)))
        raise ConfigError(self.problems, self.sources)

    def _read(self, path: Path) -> None:
        source = read_source(path, self.env)
        self.digests[path] = source.digest
        self.model, problems = source.check(schema.Proxy)
        self.problems += problems
        self.root = source.tree or self.root

    def _policies(self) -> Iterator[Written]:
        """The policies under ``policies``, then those of ``policyFiles``."""
        names: dict[str, Mark] = {}
        section = self.root.entries["policies"].node if "policies" in self.root.entries else None
        if isinstance(section, Map):
            for name, entry in section.entries.items():
                names[name] = entry.mark
                valid = validate(schema.Policy, entry.node)[0] is not None
                yield Written(name, entry.node, join("policies", name), entry.mark, valid)
        for file in self._policy_files():
            source = read_source(file, self.env)
            self.digests[file] = source.digest
            model, problems = source.check(schema.Policy)
            self.problems += problems
            name, mark = file.stem, Mark(str(file))
            if name in names:
                self.problems.append(Problem(mark, "", f"policy '{name}' is already defined at {names[name]}"))
                continue
            if not re.match(schema.NAME, name):
                self.problems.append(Problem(mark, "", f"the file names the policy, and '{name}' is not a name"))
            names[name] = mark
            node = source.tree or Map(mark, {})
            yield Written(name, node, "", node.mark, model is not None)

    def _policy_files(self) -> Iterator[Path]:
        """Every file that ``policyFiles`` names, once, in the order of the patterns."""
        patterns = self.root.entries["policyFiles"].node if "policyFiles" in self.root.entries else None
        known: set[Path] = set()
        for i, item in enumerate(patterns.items if isinstance(patterns, Sequence) else ()):
            if not isinstance(item, Scalar) or not isinstance(item.value, str) or not item.value:
                continue
            pattern = str(item.value)
            try:
                found = expand_glob(self.folder, pattern)
            except ValueError as error:
                self.problems.append(Problem(item.mark, join("policyFiles", i), str(error)))
                continue
            self.patterns.append(pattern)
            if not found:
                problem = Problem(item.mark, join("policyFiles", i), f"no file matches '{item.text}'")
                (self.warnings if _is_glob(pattern) else self.problems).append(problem)
            yield from (file for file in found if file not in known)
            known.update(found)

    def _references(self) -> Iterator[Problem]:
        """Names that nothing has: providers and policies of ``models``, policies of ``clientKeys``; and names given twice."""
        providers = list(_keys(self.root, "providers")) or ["openai"]
        policies = [*self.written, *(name for name in shipped_presets() if name not in self.written)]
        for i in range(_length(self.root, "models")):
            for key, kind, known in (("provider", "provider", providers), ("policy", "policy or preset", policies)):
                yield from self._reference(("models", i, key), kind, known)
        keys: dict[str, tuple[str | int, ...]] = {}
        for i in range(_length(self.root, "server", "clientKeys")):
            here = ("server", "clientKeys", i)
            for n in range(_length(self.root, *here, "policies")):
                yield from self._reference((*here, "policies", n), "policy or preset", policies)
            for key in ("name", "key"):
                value = text_at(self.root, *here, key)
                first = keys.setdefault(f"{key}={value}", here) if value else here
                if first != here:
                    shown = f"'{value}'" if key == "name" else "the same key"
                    mark = mark_of(self.root, *here, key)
                    yield Problem(mark, _path(*here, key), f"{shown} is already given at {_path(*first, key)}")

    def _reference(self, loc: tuple[str | int, ...], kind: str, known: list[str]) -> Iterator[Problem]:
        name = text_at(self.root, *loc)
        if name and name not in known:
            yield Problem(mark_of(self.root, *loc), _path(*loc), f"no {kind} '{name}'{did_you_mean(name, known)}")

    def _build(self, model: schema.Proxy) -> Settings:
        providers = model.providers or {"openai": DEFAULT_PROVIDER}
        policies = {name: resolved.policy for name, resolved in self.resolution.policies.items()}
        usual = DEFAULT_POLICY if DEFAULT_POLICY in policies else FALLBACK_POLICY
        routes = model.models or [schema.Model(match="*", provider=next(iter(providers)))]
        return Settings(
            server=_server(model.server),
            providers=MappingProxyType({name: _provider(name, provider) for name, provider in providers.items()}),
            routes=tuple(RouteSettings(r.match, r.provider, r.policy or usual, r.context_window) for r in routes),
            store=_store(model.store, self.folder),
            telemetry=TelemetrySettings(model.telemetry.service_name, model.telemetry.capture_content),
            policies=MappingProxyType(policies),
            sources=self.sources,
        )

    def _after(self, settings: Settings) -> Iterator[Problem]:
        """What only the whole shows: a summarizer that no route takes, a relay that is open to strangers."""
        for name, written in self.written.items():
            for i, strategy in enumerate(settings.policies[name].strategies):
                model = getattr(strategy, "summarizer_model", None)
                if model and match_route(settings.routes, model) is None:
                    path = f"{join(written.path, 'strategies')}[{i}].summarizerModel"
                    mark = mark_of(self.resolution.policies[name].tree, "strategies", i, "summarizerModel")
                    yield Problem(mark, path, f"no entry of models matches '{model}'")
        if why := open_relay(settings.server, settings.providers):
            yield Problem(mark_of(self.root, "server", "host"), "server.host", why)


def expand_glob(folder: Path, pattern: str) -> list[Path]:
    """The files that a pattern of ``policyFiles`` names, sorted; hidden files and folders only where it names them.

    Raises:
        ValueError: not a pattern.
    """
    if not _is_glob(pattern):
        file = folder / pattern
        return [file] if file.is_file() else []
    if any("**" in part and part != "**" for part in Path(pattern).parts):
        message = "'**' stands for whole folders, as in policies/**/*.yaml"
        raise ValueError(message)
    absolute = Path(pattern)
    base = Path(absolute.anchor) if absolute.is_absolute() else folder
    relative = str(absolute.relative_to(absolute.anchor)) if absolute.is_absolute() else pattern
    hidden = any(part.startswith(".") and part != ".." for part in Path(relative).parts)
    found = [file for file in base.glob(relative) if file.is_file()]
    if not hidden:
        found = [f for f in found if not any(p.startswith(".") and p != ".." for p in f.relative_to(base).parts)]
    return sorted(found)


def _is_glob(pattern: str) -> bool:
    return any(sign in pattern for sign in "*?[")


def _path(*loc: str | int) -> str:
    path = ""
    for part in loc:
        path = join(path, part)
    return path


def _at(node: Node, *loc: str | int) -> Node | None:
    for part in loc:
        if isinstance(node, Map) and part in node.entries:
            node = node.entries[str(part)].node
        elif isinstance(node, Sequence) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
        else:
            return None
    return node


def _length(node: Node, *loc: str | int) -> int:
    found = _at(node, *loc)
    return len(found.items) if isinstance(found, Sequence) else 0


def _keys(node: Node, *loc: str | int) -> tuple[str, ...]:
    found = _at(node, *loc)
    return tuple(found.entries) if isinstance(found, Map) else ()


def _secret(text: str | None) -> Secret | None:
    return Secret(text) if text else None


def _server(model: schema.Server) -> ServerSettings:
    return ServerSettings(
        host=model.host,
        port=model.port,
        max_body_bytes=model.max_body_bytes,
        tenant=model.tenant,
        admin_key=_secret(model.admin_key),
        trusted_proxies=tuple(model.trusted_proxies),
        allow_anonymous=model.allow_anonymous,
        client_keys=tuple(ClientKey(k.name, Secret(k.key), tuple(k.policies)) for k in model.client_keys),
    )


def _provider(name: str, model: schema.Provider) -> ProviderSettings:
    return ProviderSettings(
        name=name,
        kind=model.kind,
        base_url=model.base_url,
        api_key=_secret(model.api_key),
        headers=MappingProxyType({header: Secret(text) for header, text in model.headers.items()}),
        timeouts=Timeouts(**model.timeouts.model_dump()),
    )


def _store(model: schema.Store, folder: Path) -> StoreSettings:
    return StoreSettings(
        url=Secret(model.url),
        state_dir=folder / model.state_dir if model.state_dir else None,
        ttl_seconds=model.ttl_seconds,
        keep_originals=model.keep_originals,
        originals_ttl_seconds=model.originals_ttl_seconds,
        secret=_secret(model.secret),
    )
