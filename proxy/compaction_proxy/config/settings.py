"""Settings: the whole configuration as frozen values, resolved. What the shell is built from; nothing is read here.

Secrets are :class:`Secret`: ordinary strings that show themselves as ``'********'`` in every repr.
"""

from __future__ import annotations

import fnmatch
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from compaction_policies.policy import Policy
from compaction_proxy.config.report import Sources


class Secret(str):
    """A string that must not be seen: its repr is masked. ``str()`` and f-strings still give the text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'********'"


@dataclass(frozen=True, slots=True)
class ClientKey:
    """Who may use the proxy. ``policies``: allowed in ``x-compaction-policy``, the first used by itself; empty: any."""

    name: str
    key: Secret
    policies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """``server``. ``tenant``: ``auto``, ``credential``, ``single`` or ``header:NAME``; sizes are bytes."""

    host: str
    port: int
    max_body_bytes: int
    tenant: str
    admin_key: Secret | None
    trusted_proxies: tuple[str, ...]
    allow_anonymous: bool
    client_keys: tuple[ClientKey, ...]

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach the address."""
        return is_loopback(self.host)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """``timeouts`` of a provider, in seconds."""

    connect_seconds: float
    first_byte_seconds: float
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class ProviderSettings:
    """A provider. ``base_url`` has no trailing slash; values of ``headers`` are secrets."""

    name: str
    kind: str
    base_url: str
    api_key: Secret | None
    headers: Mapping[str, Secret]
    timeouts: Timeouts


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """An entry of ``models``: the first whose glob matches the model's name is used. ``context_window`` is tokens."""

    match: str
    provider: str
    policy: str
    context_window: int | None


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """``store``. ``url`` may hold a password; ``public_url`` is the one to show. ``state_dir`` is ready to use."""

    url: Secret
    state_dir: Path | None
    ttl_seconds: int
    keep_originals: bool
    originals_ttl_seconds: int
    secret: Secret | None

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def public_url(self) -> str:
        """The URL without user, password and query."""
        parts = urlsplit(str(self.url))
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """``telemetry``; everything else is said by the standard ``OTEL_*`` variables."""

    service_name: str
    capture_content: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """A whole configuration.

    Args:
        routes: ``models`` in order.
        policies: by name, resolved; the shipped presets are among them.
        sources: the files that were read, for noticing a change.
        address: host and port that replaced those of the file, if any did.
        warnings: what works but is probably not meant, each as ``file:line:col: path: message``.
    """

    server: ServerSettings
    providers: Mapping[str, ProviderSettings]
    routes: tuple[RouteSettings, ...]
    store: StoreSettings
    telemetry: TelemetrySettings
    policies: Mapping[str, Policy]
    sources: Sources = field(default_factory=Sources)
    address: tuple[str | None, int | None] = (None, None)
    warnings: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that was read."""
        return tuple(self.sources.digests)


def is_loopback(host: str) -> bool:
    """True for ``localhost``, 127.0.0.0/8 and ::1."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def match_route(routes: tuple[RouteSettings, ...], model: str) -> RouteSettings | None:
    """The first route whose glob matches the model's name (case-sensitive), or ``None``."""
    return next((route for route in routes if fnmatch.fnmatchcase(model, route.match)), None)


def open_relay(server: ServerSettings, providers: Mapping[str, ProviderSettings]) -> str | None:
    """Why this would let strangers use a provider's key, or ``None``.

    Asked again where ``serve --host`` replaces the address.
    """
    if server.loopback or server.client_keys or server.allow_anonymous:
        return None
    keyed = [name for name, provider in providers.items() if provider.api_key]
    if not keyed:
        return None
    return (
        f"anybody who reaches {server.host} could use the apiKey of '{keyed[0]}'; "
        "set server.clientKeys, listen on 127.0.0.1, or set server.allowAnonymous: true"
    )
