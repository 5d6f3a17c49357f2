"""The layout of the store's keys. Tenants and sessions stand in them as short hashes, never as they are.

All keys of one conversation share the hash tag in braces::

    cp:{TENANT:SESSION}:i:POLICY:EPOCH:H_C     index: the records of one chain hash
    cp:{TENANT:SESSION}:r:ID                   record
    cp:{TENANT:SESSION}:n:POLICY:EPOCH:ROOT    newest: how many items the record last applied to this root covers
    cp:{TENANT:SESSION}:a:POLICY:ROOT          attempt state
    cp:{TENANT:SESSION}:lock:POLICY:H_C        single flight
    cp:{o:PREFIX}:o:HANDLE                     original of a replaced value
    cp:{o:PREFIX}:k:HANDLE                     that an original existed, under the record's lifetime
    cp:{secret}:tenants                        the key of the tenants' hashes
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from urllib.parse import quote

TENANT_SECRET = "cp:{secret}:tenants"


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a conversation's records live: they apply within one tenant, session, policy *name* and epoch."""

    tenant: str
    session: str
    policy: str
    epoch: int


class ScopeKeys:
    """The keys of one scope."""

    __slots__ = ("_base", "_index", "_policy", "_scoped", "tag")

    def __init__(self, scope: Scope) -> None:
        self.tag = f"{_short(scope.tenant)}:{_short(scope.session)}"
        self._base = f"cp:{{{self.tag}}}"
        self._policy = quote(scope.policy.encode("utf-8", "surrogatepass"), safe="")
        self._scoped = f"{self._policy}:{scope.epoch}"
        self._index = f"{self._base}:i:{self._scoped}:"

    def index(self, chain_hash: bytes) -> str:
        return self._index + chain_hash.hex()

    def record(self, record_id: str) -> str:
        return f"{self._base}:r:{record_id}"

    def newest(self, root: bytes) -> str:
        return f"{self._base}:n:{self._scoped}:{root.hex()}"

    def attempt(self, root: bytes) -> str:
        return f"{self._base}:a:{self._policy}:{root.hex()}"

    def lock(self, chain_hash: bytes) -> str:
        return f"{self._base}:lock:{self._policy}:{chain_hash.hex()}"


def original(handle: str) -> str:
    return f"cp:{{o:{handle[:2]}}}:o:{handle}"


def tombstone(handle: str) -> str:
    return f"cp:{{o:{handle[:2]}}}:k:{handle}"


def _short(name: str) -> str:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()
