"""Which provider and policy a request goes to. Pure: first match wins."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Route:
    """One entry of ``models``. ``match`` is a glob on the model's name."""

    match: str
    provider: str
    policy: str
    context_window: int | None = None


def route_of(model: str, routes: Sequence[Route]) -> Route | None:
    """The first entry that matches; ``None`` where none does."""
    return next((route for route in routes if model == route.match or fnmatch.fnmatchcase(model, route.match)), None)


def default_provider(routes: Sequence[Route], providers: Sequence[str]) -> str:
    """For requests that name no model: the provider of the last ``*`` entry, else the first provider."""
    return next((route.provider for route in reversed(routes) if route.match == "*"), providers[0])
