"""From written policies to policy values: presets, merging, what only the merged policy can show. No files but the presets.

A policy is resolved on its YAML tree, so that every value keeps the place where it was written.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import resources
from types import MappingProxyType
from typing import Any

from compaction_policies import policy as core
from compaction_policies.prompts import TEMPLATE_VERSION
from compaction_proxy.config import schema
from compaction_proxy.config.hints import LATER_VALUES, NOT_AVAILABLE
from compaction_proxy.config.nodes import Map, Node, Scalar, Sequence, find, merge, parse
from compaction_proxy.config.report import Mark, Problem, did_you_mean, join
from compaction_proxy.config.validate import text_at, validate

PRESET_FILE = "preset "
"""Marks of a shipped preset's values: ``preset balanced``."""

DEFAULT_PRESET = "balanced"
LOWEST_SENSIBLE_TOKENS = 2_000
HIGHEST_SENSIBLE_TARGET = 0.7
_KEEPS = ("preserveRecentTokens", "keepTokens")


@dataclass(frozen=True, slots=True)
class Written:
    """A policy as it is written: its tree, the path of its root for messages, and whether its keys are valid."""

    name: str
    node: Node
    path: str
    mark: Mark
    valid: bool


@dataclass(frozen=True, slots=True)
class Resolved:
    """A policy's value and the merged tree that it was made of."""

    policy: core.Policy
    tree: Map
    model: schema.Policy


@dataclass(frozen=True, slots=True)
class Resolution:
    policies: Mapping[str, Resolved]
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]


@functools.cache
def shipped_presets() -> Mapping[str, Map]:
    """The presets of the core package, by name, as trees."""
    found: dict[str, Map] = {}
    for file in sorted(resources.files("compaction_policies").joinpath("presets").iterdir(), key=lambda f: f.name):
        name, dot, suffix = file.name.rpartition(".")
        if dot and suffix == "yaml":
            node, problems = parse(file.read_bytes(), f"{PRESET_FILE}{name}")
            if problems or not isinstance(node, Map):
                message = f"preset {name} cannot be read: {problems}"
                raise ValueError(message)
            found[name] = node
    return MappingProxyType(found)


def resolve(written: Mapping[str, Written]) -> Resolution:
    """Resolve all policies, the shipped presets included.

    Args:
        written: the policies of the configuration, by name. One that is not ``valid`` is known by name and not resolved.
    """
    presets = shipped_presets()
    problems = [problem for policy in written.values() for problem in _preset_problems(policy, written, presets)]
    broken = {problem.path for problem in problems}
    resolved = {name: _resolved(name, tree) for name, tree in presets.items() if name not in written}
    warnings: list[Problem] = []
    for policy in written.values():
        tree = _merged(policy, written, presets, broken, ())
        if tree is None:
            continue
        found, odd = _conflicts(policy, tree)
        problems += found
        warnings += odd
        if not found:
            resolved[policy.name] = _resolved(policy.name, tree)
    return Resolution(resolved, tuple(problems), tuple(dict.fromkeys(warnings)))


def revision(policy: core.Policy, template_version: str = TEMPLATE_VERSION) -> str:
    """12 hex digits that change with any value of the policy (not its name) and with the prompt template."""
    values = {key: value for key, value in asdict(policy).items() if key not in ("name", "revision")}
    text = json.dumps([values, template_version], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _base_name(policy: Written) -> str:
    return text_at(policy.node, "preset") or DEFAULT_PRESET


def _preset_problems(policy: Written, written: Mapping[str, Written], presets: Mapping[str, Map]) -> Iterator[Problem]:
    """What is wrong with a policy's name and its ``preset``; at the path ``<policy>.preset``."""
    base, path = _base_name(policy), join(policy.path, "preset")
    node, _, found = find(policy.node, ("preset",))
    mark = node.mark if found else policy.mark
    if policy.name in presets and base != policy.name:
        message = f"'{policy.name}' is the name of a shipped preset; add 'preset: {policy.name}', or take another name"
        yield Problem(mark, path, message)
    elif base == policy.name and base not in presets:
        yield Problem(mark, path, "a policy cannot be its own preset")
    elif base not in written and base not in presets:
        known = [name for name in (*presets, *written) if name != policy.name]
        hint = f": {NOT_AVAILABLE}" if base in LATER_VALUES else did_you_mean(base, known)
        yield Problem(mark, path, f"no preset or policy '{base}'{hint}")
    elif cycle := _cycle(policy, written):
        yield Problem(mark, path, f"presets in a circle: {' -> '.join(cycle)}")


def _cycle(policy: Written, written: Mapping[str, Written]) -> list[str]:
    """The circle that a policy stands in, or nothing."""
    chain = [policy.name]
    current = policy
    while (base := _base_name(current)) != current.name and base in written:
        chain.append(base)
        if base == policy.name:
            return chain
        if base in chain[:-1]:
            return []
        current = written[base]
    return []


def _merged(
    policy: Written,
    written: Mapping[str, Written],
    presets: Mapping[str, Map],
    broken: set[str],
    above: tuple[str, ...],
) -> Map | None:
    """The policy on its base, ``preset`` left out; ``None`` where something it is based on has a problem."""
    if not policy.valid or join(policy.path, "preset") in broken or policy.name in above:
        return None
    base = _base_name(policy)
    below: Map | None
    if base != policy.name and base in written:
        below = _merged(written[base], written, presets, broken, (*above, policy.name))
    else:
        below = presets[base]
    if below is None or not isinstance(policy.node, Map):
        return None
    own = Map(policy.node.mark, {key: entry for key, entry in policy.node.entries.items() if key != "preset"})
    tree = merge(below, own)
    return tree if isinstance(tree, Map) else None


def _resolved(name: str, tree: Map) -> Resolved:
    model, problems = validate(schema.Policy, tree)
    if model is None:
        message = f"policy {name} is made of valid parts and is not valid: {'; '.join(map(str, problems))}"
        raise ValueError(message)
    policy = build(name, model)
    return Resolved(replace(policy, revision=revision(policy)), tree, model)


def build(name: str, model: schema.Policy) -> core.Policy:
    """The policy value of a complete, valid policy; its revision is still empty."""
    if isinstance(model.thresholds, schema.Thresholds):
        thresholds = core.Thresholds(**model.thresholds.model_dump())
    else:
        thresholds = core.Thresholds(never=True)
    return core.Policy(
        name=name,
        mode=model.mode,
        epoch=model.epoch,
        thresholds=thresholds,
        exclude_tools=tuple(model.exclude_tools),
        preserve_user_messages=model.preserve_user_messages,
        preserve_user_tokens=model.preserve_user_tokens,
        protected_max_tokens=model.protected_max_tokens,
        summary_role=model.summary_role,
        pre_step=model.pre_step,
        last_resort=model.last_resort,
        strategies=tuple(map(_strategy, model.strategies)),
        pins=core.Pins(tuple(model.pins.constraints)),
        session=core.SessionSources(tuple(model.session.headers), tuple(model.session.body_fields)),
        timing=core.Timing(**model.timing.model_dump()),
    )


def _strategy(model: schema.Clear | schema.Summarize | schema.Truncate) -> core.Strategy:
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in model.model_dump().items()
    }
    match model:
        case schema.Clear():
            return core.ClearOldToolResults(**values)
        case schema.Summarize():
            return core.SummarizeOldPreserveRecent(**values)
        case schema.Truncate():
            return core.Truncate(**values)


def _conflicts(policy: Written, tree: Map) -> tuple[list[Problem], list[Problem]]:
    """What is wrong, and what is odd, in the merged policy; values that a shipped preset brings are not blamed."""
    problems: list[Problem] = []
    warnings: list[Problem] = []

    def at(node: Scalar, *loc: str | int) -> tuple[Mark, str]:
        path = policy.path
        for part in loc:
            path = join(path, part)
        return node.mark, path

    limit = _number(tree, "thresholds", "thresholdTokens")
    if limit and _written(limit) and _value(limit) < LOWEST_SENSIBLE_TOKENS:
        message = f"{_value(limit):g} tokens is less than a useful conversation ({LOWEST_SENSIBLE_TOKENS} and more is sensible)"
        warnings.append(Problem(*at(limit, "thresholds", "thresholdTokens"), message))
    target = _number(tree, "thresholds", "targetRatio")
    if target and _written(target) and _value(target) > HIGHEST_SENSIBLE_TARGET:
        message = f"above {HIGHEST_SENSIBLE_TARGET} compactions come so often that each loses the provider's cache"
        warnings.append(Problem(*at(target, "thresholds", "targetRatio"), message))
    strategies = tree.entries["strategies"].node if "strategies" in tree.entries else None
    for i in range(len(strategies.items) if isinstance(strategies, Sequence) else 0):
        for key in _KEEPS:
            keep = _number(tree, "strategies", i, key)
            if limit and keep and _written(keep) and _value(keep) >= _value(limit):
                message = (
                    f"must be less than thresholdTokens ({_value(limit):g}, {limit.mark}), got {_value(keep):g}: "
                    "nothing would be left to compact"
                )
                problems.append(Problem(*at(keep, "strategies", i, key), message))
    return problems, warnings


def _number(tree: Node, *loc: str | int) -> Scalar | None:
    """The number at exactly ``loc``, read by the core rules where it comes from a variable."""
    node, _, path = find(tree, loc)
    expected = ""
    for part in loc:
        expected = join(expected, part)
    return node if path == expected and isinstance(node, Scalar) and _value(node) else None


def _value(node: Scalar) -> float:
    try:
        return float(node.value) if node.value is not None else 0.0
    except ValueError:
        return 0.0


def _written(node: Scalar) -> bool:
    return not node.mark.file.startswith(PRESET_FILE)
