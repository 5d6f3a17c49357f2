"""Who asks: client keys, tenants, and who may use the admin paths. Pure; secrets are compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compaction_proxy.config.settings import ClientKey, ServerSettings, is_loopback
from compaction_proxy.errors import Forbidden, Unauthorized

_Header = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. ``tenant`` is never a raw credential; ``key`` is the client key that was used."""

    tenant: str
    key: ClientKey | None = None


def caller(settings: ServerSettings, header: _Header, secret: bytes) -> Caller:
    """Authenticate and name the tenant. Raises :class:`Unauthorized`.

    Args:
        secret: keys the hash of a credential, so that a store never holds one.
    """
    credential = credential_of(header)
    key = client_key(settings, credential)
    return Caller(_tenant(settings, header, credential, key, secret), key)


def credential_of(header: _Header) -> str | None:
    """The client's credential: a bearer token, else an API key header."""
    authorization = header("authorization")
    if authorization:
        scheme, _, token = authorization.partition(" ")
        return token.strip() if scheme.lower() == "bearer" and token.strip() else authorization
    return header("x-api-key") or header("api-key") or None


def client_key(settings: ServerSettings, credential: str | None) -> ClientKey | None:
    """The client key that was sent, ``None`` where none are configured. Raises :class:`Unauthorized`."""
    if not settings.client_keys:
        return None
    given = (credential or "").encode("utf-8", "surrogateescape")
    found: ClientKey | None = None
    for key in settings.client_keys:
        if hmac.compare_digest(key.key.encode(), given):
            found = key
    if found is None:
        message = "unknown API key; use one of the keys in server.clientKeys" if given else "an API key is required"
        raise Unauthorized(message)
    return found


def _tenant(
    settings: ServerSettings, header: _Header, credential: str | None, key: ClientKey | None, secret: bytes
) -> str:
    how = settings.tenant
    if how.startswith("header:"):
        name = header(how.removeprefix("header:"))
        return f"h:{_hash(name, secret)}" if name else "h:"
    if how == "auto":
        if key is not None:
            return f"k:{key.name}"
        how = "single" if is_loopback(settings.host) else "credential"
    if how == "single":
        return "single"
    return f"c:{_hash(credential or '', secret)}"


def _hash(value: str, secret: bytes) -> str:
    return hashlib.blake2b(value.encode("utf-8", "surrogateescape"), key=secret[:64], digest_size=16).hexdigest()


def client_address(peer: str, forwarded_for: str | None, trusted: Sequence[str]) -> str:
    """The client's address: the peer's, or what a trusted proxy says of it (the last untrusted one of its list)."""
    hops = [hop.strip() for hop in (forwarded_for or "").split(",") if hop.strip()]
    address = peer
    while hops and _within(address, trusted):
        address = hops.pop()
    return address


def _within(address: str, networks: Sequence[str]) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(parsed in ipaddress.ip_network(network, strict=False) for network in networks)


def check_admin(settings: ServerSettings, header: _Header, peer: str) -> None:
    """The admin paths: their own key, or this machine alone where there is none. Raises Unauthorized or Forbidden."""
    if settings.admin_key is not None:
        given = header("x-compaction-admin-key") or credential_of(header) or ""
        if not hmac.compare_digest(settings.admin_key.encode(), given.encode("utf-8", "surrogateescape")):
            message = "the admin key is required (server.adminKey), as a bearer token or in x-compaction-admin-key"
            raise Unauthorized(message)
        return
    forwarded_for = header("x-forwarded-for")
    if (forwarded_for or header("forwarded")) and not _within(peer, settings.trusted_proxies):
        message = (
            "a forwarded request does not come from this machine: admin paths want server.adminKey, "
            "or the proxy in front listed in server.trustedProxies"
        )
        raise Forbidden(message)
    address = client_address(peer, forwarded_for, settings.trusted_proxies)
    if not is_loopback(address) and address != "":
        message = "admin paths answer this machine alone while server.adminKey is not set"
        raise Forbidden(message)
