"""What works but is probably not meant. Pure: settings in, warnings out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from compaction_policies.policy import Policy, SummarizeOldPreserveRecent
from compaction_proxy.config.report import Mark, Problem, join
from compaction_proxy.config.settings import RouteSettings, Settings, match_route


def advise(settings: Settings, mark: Mark) -> Iterator[Problem]:
    """Warnings that need nothing but the settings; all stand at ``mark``, the file as a whole."""
    where = Mark(mark.file)
    for i, route in enumerate(settings.routes[:-1]):
        if route.match == "*":
            yield Problem(where, join("models", i), "matches every model; the entries after it are never used")
            break
    if settings.server.client_keys:
        for name, provider in settings.providers.items():
            if provider.api_key is None:
                message = "clientKeys are set and this provider has no apiKey: it is called without a credential"
                yield Problem(where, f"providers.{name}", message)
    yield from dict.fromkeys(_summarizers(settings, where))


def never_fires(settings: Settings, mark: Mark, window: Callable[[str], int | None]) -> Iterator[Problem]:
    """Routes whose policy has no limit: no ``thresholdTokens``, and a model whose window is not known.

    Args:
        window: the catalogue: a model's context window in tokens, or ``None``.
    """
    for i, route in enumerate(settings.routes):
        policy = settings.policies[route.policy]
        thresholds = policy.thresholds
        if policy.mode == "off" or thresholds.never or thresholds.threshold_tokens or route.context_window:
            continue
        if any(sign in route.match for sign in "*?["):
            message = "compacts only models whose window the catalogue knows; set contextWindow or thresholdTokens"
        elif window(route.match) is None:
            message = f"never compacts: the window of {route.match} is not known; set contextWindow or thresholdTokens"
        else:
            continue
        yield Problem(Mark(mark.file), join("models", i), f"policy '{route.policy}' {message}")


def _summarizers(settings: Settings, mark: Mark) -> Iterator[Problem]:
    """Summaries that another provider writes: text goes there, maybe without a credential."""
    for route, policy in _pairs(settings):
        for strategy in policy.strategies:
            if not isinstance(strategy, SummarizeOldPreserveRecent) or strategy.summarizer != "model":
                continue
            target = match_route(settings.routes, strategy.summarizer_model) if strategy.summarizer_model else None
            if target is None or target.provider == route.provider:
                continue
            path = f"policies.{policy.name}"
            yield Problem(
                mark,
                path,
                f"text of conversations with '{route.provider}' goes to '{target.provider}' for summaries "
                f"(summarizerModel {strategy.summarizer_model})",
            )
            if settings.providers[target.provider].api_key is None:
                message = f"'{target.provider}' has no apiKey: summaries are asked for without a credential"
                yield Problem(mark, path, message)


def _pairs(settings: Settings) -> Iterator[tuple[RouteSettings, Policy]]:
    """Every route with every policy that a request on it may get without asking for it."""
    named = [name for key in settings.server.client_keys for name in key.policies[:1]]
    for route in settings.routes:
        for name in dict.fromkeys((route.policy, *named)):
            yield route, settings.policies[name]
