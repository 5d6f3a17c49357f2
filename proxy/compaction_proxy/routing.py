"""Which provider and policy a request goes to. Pure: the first entry of ``models`` that matches wins."""

from __future__ import annotations

from dataclasses import dataclass

from compaction_policies.policy import Policy
from compaction_proxy.config.settings import ClientKey, ProviderSettings, Settings, match_route
from compaction_proxy.errors import BadRequest, Forbidden

DEFAULT_POLICY = "balanced"
"""For models that no entry names."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a request goes, and under which policy. ``context_window`` is the entry's own, in tokens."""

    provider: ProviderSettings
    policy: Policy
    context_window: int | None


def destination(settings: Settings, model: str, named: str | None, key: ClientKey | None) -> Destination:
    """Policy precedence: the header (if the client's key allows it), the client key's first, the model's.

    Args:
        named: ``x-compaction-policy``. Raises :class:`BadRequest` for an unknown one, :class:`Forbidden` for one that the
            client's key may not use.
    """
    route = match_route(settings.routes, model)
    provider = route.provider if route is not None else default_provider(settings)
    policy = route.policy if route is not None else DEFAULT_POLICY
    allowed = key.policies if key is not None else ()
    if named:
        if named not in settings.policies:
            message = f"unknown policy '{named}' in x-compaction-policy; known: {', '.join(sorted(settings.policies))}"
            raise BadRequest(message, param="x-compaction-policy")
        if allowed and named not in allowed:
            message = f"this key may not use the policy '{named}'; allowed: {', '.join(allowed)}"
            raise Forbidden(message, param="x-compaction-policy")
        policy = named
    elif allowed:
        policy = allowed[0]
    window = route.context_window if route is not None else None
    return Destination(settings.providers[provider], settings.policies[policy], window)


def default_provider(settings: Settings) -> str:
    """For requests that name no model: the provider of the last ``*`` entry, else the first provider."""
    for route in reversed(settings.routes):
        if route.match == "*":
            return route.provider
    return next(iter(settings.providers))
