"""Policies as frozen values: what the YAML says, resolved, with every default filled in.

The shell reads and validates YAML and builds these; the core reads nothing else. Names are the YAML's, in snake case.
Sizes are tokens unless the name says otherwise; times are milliseconds where the name ends in ``_ms``.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Mode: TypeAlias = Literal["off", "shadow", "on"]
Summarizer: TypeAlias = Literal["model", "extractive"]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a compaction is due, and how far it goes.

    Args:
        threshold_tokens: absolute limit of the forwarded prompt; ``None`` = none.
        threshold_ratio: share of the model's context window; ``None`` = none. Counts only where the window is known.
        never: no threshold ever fires (YAML ``thresholds: never``); an active record still applies.
        reserve_tokens: room for the answer's overhead, scaled to window/10.
        min_reclaim_tokens: a pass must free at least this much, scaled to limit/16.
        target_ratio: a pass aims at this share of the limit.
    """

    threshold_tokens: int | None = 120_000
    threshold_ratio: float | None = 0.75
    reserve_tokens: int = 8_192
    min_reclaim_tokens: int = 2_000
    target_ratio: float = 0.5
    never: bool = False


@dataclass(frozen=True, slots=True)
class ClearOldToolResults:
    """``clear-old-tool-results``: replace old tool results by a placeholder. No model.

    Args:
        keep_tool_uses: the newest N tool results stay.
        keep_tokens: tool results within the newest N tokens of the conversation stay.
        clear_at_least: runs only if this much comes free (scaled to limit/4).
        clear_tool_inputs: also shorten long strings in the arguments of cleared calls: ``False``, ``True``, tool globs.
        keep_errors: results that report an error stay.
        exclude_tools: adds to the policy's.
        externalize: store the original and name its handle in the placeholder.
        preview_chars: first characters of the original kept in the placeholder.
    """

    keep_tool_uses: int = 3
    keep_tokens: int = 0
    clear_at_least: int = 8_000
    clear_tool_inputs: bool | tuple[str, ...] = True
    keep_errors: bool = True
    exclude_tools: tuple[str, ...] = ()
    externalize: bool = True
    preview_chars: int = 0
    kind: Literal["clear-old-tool-results"] = "clear-old-tool-results"


@dataclass(frozen=True, slots=True)
class SummarizeOldPreserveRecent:
    """``summarize-old-preserve-recent``: one summary for the old part, the recent part verbatim.

    Args:
        preserve_recent_turns: this many newest turns stay whole where they fit.
        preserve_recent_tokens: at most this much stays verbatim at the end (never less than the newest group).
        preserve_user_messages: overrides the policy's; ``None`` = the policy's.
        summarizer: ``model``, or ``extractive`` (no model).
        summarizer_model: the model that writes summaries; ``None`` = the conversation's own.
        summarizer_timeout_ms: per call.
        summarizer_input_char_budget: ``None`` = from the summarizer's window, else 96,000 characters.
        summary_max_tokens: output limit of the summary, scaled to limit/8.
        ledger: list exact paths, identifiers, numbers, URLs and error codes of the span beside the summary.
        ledger_max_tokens: scaled to limit/12.
        template_name: the prompt template; see :mod:`compaction_policies.prompts`.
    """

    preserve_recent_turns: int = 2
    preserve_recent_tokens: int = 20_000
    preserve_user_messages: int | Literal["all"] | None = None
    exclude_tools: tuple[str, ...] = ()
    summarizer: Summarizer = "model"
    summarizer_model: str | None = None
    summarizer_timeout_ms: int = 30_000
    summarizer_input_char_budget: int | None = None
    summary_max_tokens: int = 2_000
    ledger: bool = True
    ledger_max_tokens: int = 2_000
    template_name: str = "default"
    kind: Literal["summarize-old-preserve-recent"] = "summarize-old-preserve-recent"


@dataclass(frozen=True, slots=True)
class Truncate:
    """``truncate``: drop the oldest groups while the view is above the limit. No model."""

    exclude_tools: tuple[str, ...] = ()
    preserve_user_messages: int | Literal["all"] | None = None
    kind: Literal["truncate"] = "truncate"


Strategy: TypeAlias = ClearOldToolResults | SummarizeOldPreserveRecent | Truncate


@dataclass(frozen=True, slots=True)
class Pins:
    """``pins``: constraints whose exact words stand in every synthetic message."""

    constraints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionSources:
    """``session``: headers and body fields (dotted) that name the session, asked before the built-in ones."""

    headers: tuple[str, ...] = ()
    body_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """``timing``: how long a request waits. ``inline_budget_ms`` for the summary it started itself,
    ``gate_wait_ms`` for one that it finds in flight."""

    gate_wait_ms: int = 10_000
    inline_budget_ms: int = 25_000


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy, complete. ``revision`` is a short digest of the resolved YAML: stored in records, never matched.

    Args:
        exclude_tools: exact names or globs, on the *call's* name; their results are unchanged by every strategy.
        preserve_user_messages: ``"all"`` or the newest N; carried verbatim within ``preserve_user_tokens``.
        preserve_user_tokens: hard budget of the carried user messages, scaled to limit/4.
        protected_max_tokens: bound of the protected originals: ``"auto"`` = a quarter of the target; ``None`` = none.
        summary_role: role of the synthetic message.
        pre_step: may start a compaction inside a tool loop (the last item is a tool result).
        last_resort: above the hard limit, when all else fails: ``truncate``, or ``forward`` the form last sent.
        epoch: raising it retires every older record.
    """

    name: str
    revision: str = ""
    mode: Mode = "on"
    epoch: int = 0
    thresholds: Thresholds = field(default_factory=Thresholds)
    exclude_tools: tuple[str, ...] = ()
    preserve_user_messages: int | Literal["all"] = "all"
    preserve_user_tokens: int = 8_000
    protected_max_tokens: int | Literal["auto"] | None = "auto"
    summary_role: Literal["user", "assistant"] = "user"
    pre_step: bool = True
    last_resort: Literal["truncate", "forward"] = "truncate"
    strategies: tuple[Strategy, ...] = (ClearOldToolResults(), SummarizeOldPreserveRecent())
    pins: Pins = field(default_factory=Pins)
    session: SessionSources = field(default_factory=SessionSources)
    timing: Timing = field(default_factory=Timing)


def matches_tool(name: str, patterns: tuple[str, ...]) -> bool:
    """True if a tool's name is one of the exact names or globs (case-sensitive)."""
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
