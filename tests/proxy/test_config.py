"""Configuration: what is refused and in which words, how presets merge, and that each key does something."""

from __future__ import annotations

from pathlib import Path

import pytest

from compaction_policies.policy import Policy
from compaction_proxy.config import ConfigError, Reload, Watcher, load_settings, schema

HEAD = "providers: {p: {baseUrl: https://example.org/v1}}\nmodels: [{match: '*', provider: p, policy: mine}]\n"


def problems(tmp_path: Path, text: str, env: dict[str, str] | None = None) -> list[str]:
    file = tmp_path / "proxy.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_settings(file, env or {})
    return [str(problem).replace(str(file), "proxy.yaml") for problem in caught.value.problems]


def policy(tmp_path: Path, text: str, env: dict[str, str] | None = None) -> Policy:
    file = tmp_path / "proxy.yaml"
    indented = "\n".join(f"    {line}" for line in text.splitlines())
    file.write_text(f"{HEAD}policies:\n  mine:\n{indented}\n", encoding="utf-8")
    return load_settings(file, env or {}).policies["mine"]


BAD = {
    "unknown key": ("servr: {}\n", ["proxy.yaml:1:1: servr: unknown key; did you mean 'server'?"]),
    "unknown key in a policy": (
        HEAD + "policies: {mine: {thresholds: {thresholdToken: 5}}}",
        ["did you mean 'thresholdTokens'?"],
    ),
    "duplicate key": ("server: {port: 1}\nserver: {port: 2}\n", ["proxy.yaml:2:1", "server"]),
    "wrong type": ("server: {port: '80'}\n", ["proxy.yaml:1:16: server.port: ", "got '80'"]),
    "number with a unit": (
        HEAD + "policies: {mine: {thresholds: {thresholdTokens: 1k}}}",
        ["thresholdTokens", "got '1k'"],
    ),
    "percent": (HEAD + "policies: {mine: {thresholds: {thresholdRatio: 80%}}}", ["thresholdRatio", "got '80%'"]),
    "ratio over one": (HEAD + "policies: {mine: {thresholds: {thresholdRatio: 80}}}", ["thresholdRatio", "80"]),
    "zero threshold": (HEAD + "policies: {mine: {thresholds: {thresholdTokens: 0}}}", ["thresholdTokens"]),
    "yes is a string": (HEAD + "policies: {mine: {preStep: yes}}", ["preStep", "got 'yes'"]),
    "bad mode": (HEAD + "policies: {mine: {mode: always}}", ["mode", "'always'"]),
    "unset variable": ("server: {adminKey: '${NOPE}'}\n", ["server.adminKey", "NOPE"]),
    "bad reference": (
        "models: [{match: '*', provider: opnai, policy: balanced}]\n",
        ["models[0].provider", "did you mean 'openai'?"],
    ),
    "bad policy": (HEAD, ["models[0].policy", "mine"]),
    "old spelling": (HEAD + "policies: {mine: {trigger: 5}}", ["trigger", "thresholds"]),
    "snake case": (HEAD + "policies: {mine: {exclude_tools: []}}", ["did you mean 'excludeTools'?"]),
    "type for kind": (HEAD + "policies: {mine: {strategies: [{type: truncate}]}}", ["kind"]),
    "unknown strategy": (HEAD + "policies: {mine: {strategies: [{kind: summarise}]}}", ["kind", "summarise"]),
    "later key": (HEAD + "policies: {mine: {rollout: 0.5}}", ["rollout", "not available in this version"]),
    "later strategy key": (
        HEAD + "policies: {mine: {strategies: [{kind: truncate, at: 0.9}]}}",
        ["at", "not available"],
    ),
    "cycle": (HEAD + "policies: {mine: {preset: other}, other: {preset: mine}}", ["mine", "other"]),
    "shipped name": (HEAD + "policies: {mine: {}, balanced: {preset: zero-llm}}", ["balanced"]),
    "store url": ("store: {url: 'redis+cluster://x'}\n", ["not supported in this version"]),
    "credentials in url": ("providers: {p: {baseUrl: 'https://a:b@example.org'}}\n", ["apiKey"]),
    "open relay": (
        "server: {host: 0.0.0.0}\nproviders: {openai: {baseUrl: https://x.org/v1, apiKey: k}}\n",
        ["apiKey", "clientKeys", "allowAnonymous"],
    ),
    "two client keys of one name": (
        "server: {clientKeys: [{name: a, key: x}, {name: a, key: y}]}\n",
        ["clientKeys"],
    ),
    "not a mapping": ("- a\n", ["proxy.yaml"]),
    "no yaml": ("a: [\n", ["proxy.yaml:"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_where_and_how(tmp_path: Path, case: str) -> None:
    text, expected = BAD[case]
    found = "\n".join(problems(tmp_path, text))
    for words in expected:
        assert words in found, found


def test_all_problems_are_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    found = problems(tmp_path, "servr: {}\nstore: {ttlSeconds: no}\npolicies: {x: {mode: 3, presett: y}}\n")
    assert len(found) == 4
    assert [line.split(":")[1] for line in found] == ["1", "2", "3", "3"]


def test_secrets_are_in_no_message_and_no_repr(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(
        "server: {adminKey: s3cret, clientKeys: [{name: a, key: s3cret}]}\n"
        "providers: {p: {baseUrl: https://x.org/v1, apiKey: s3cret, headers: {x-k: s3cret}}}\n"
        "store: {secret: s3cret, url: 'redis://u:s3cret@localhost/0'}\n",
        encoding="utf-8",
    )
    settings = load_settings(file, {})
    assert "s3cret" not in repr(settings)
    assert "s3cret" not in settings.store.public_url
    bad = problems(tmp_path, "server: {adminKey: [s3cret]}\nproviders: {p: {baseUrl: s3cret, apiKey: {s3cret: 1}}}\n")
    assert "s3cret" not in "\n".join(bad)


@pytest.mark.parametrize(
    ("text", "env", "expected"),
    [
        ("thresholds: {thresholdTokens: '${T}'}", {"T": "5000"}, 5000),
        ("thresholds: {thresholdTokens: '${T:-6000}'}", {}, 6000),
    ],
)
def test_variables_become_what_is_wanted(tmp_path: Path, text: str, env: dict[str, str], expected: int) -> None:
    assert policy(tmp_path, text, env).thresholds.threshold_tokens == expected


def test_variables_are_text_inside_text_and_a_dollar_can_be_escaped(tmp_path: Path) -> None:
    made = policy(tmp_path, "pins: {constraints: ['use $$x and ${A}: b', '${B}']}", {"A": "y", "B": "12"})
    assert made.pins.constraints == ("use $x and y: b", "12")


def test_presets_are_the_base_maps_merge_and_lists_replace(tmp_path: Path) -> None:
    made = policy(tmp_path, "preset: coding-agent\nthresholds: {targetRatio: 0.4}\nexcludeTools: [mine]")
    assert made.thresholds.threshold_tokens == 120_000
    assert made.thresholds.target_ratio == 0.4
    assert made.exclude_tools == ("mine",)
    assert [strategy.kind for strategy in made.strategies] == [
        "clear-old-tool-results",
        "summarize-old-preserve-recent",
    ]


@pytest.mark.parametrize(
    ("written", "mode"), [("on", "on"), ("off", "off"), ("true", "on"), ("false", "off"), ("shadow", "shadow")]
)
def test_mode_survives_tools_that_rewrite_it(tmp_path: Path, written: str, mode: str) -> None:
    assert policy(tmp_path, f"mode: {written}").mode == mode


def test_policy_files_are_named_by_the_file(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "support.yaml").write_text("preset: support-chat\n", encoding="utf-8")
    file = tmp_path / "proxy.yaml"
    file.write_text(
        "policyFiles: ['policies/*.yaml']\nmodels: [{match: '*', provider: openai, policy: support}]\n",
        encoding="utf-8",
    )
    assert load_settings(file, {}).policies["support"].thresholds.threshold_tokens == 24_000
    clash = problems(tmp_path, "policyFiles: ['policies/*.yaml']\npolicies: {support: {}}\n")
    assert "already defined" in clash[0]


def test_the_revision_follows_the_content_and_not_the_name(tmp_path: Path) -> None:
    one, same = (
        policy(tmp_path, "preset: balanced"),
        policy(tmp_path, "preset: balanced\nthresholds: {thresholdTokens: 120000}"),
    )
    other = policy(tmp_path, "preset: balanced\nthresholds: {thresholdTokens: 119999}")
    assert one.revision == same.revision
    assert one.revision != other.revision


CLEAR = "strategies: [{kind: clear-old-tool-results, %s}]"
SUMMARIZE = "strategies: [{kind: summarize-old-preserve-recent, %s}]"
TRUNCATE = "strategies: [{kind: truncate, %s}]"
KEYS = {
    ("Policy", "preset"): "preset: zero-llm",
    ("Policy", "mode"): "mode: shadow",
    ("Policy", "epoch"): "epoch: 3",
    ("Policy", "thresholds"): "thresholds: never",
    ("Policy", "excludeTools"): "excludeTools: [a]",
    ("Policy", "preserveUserMessages"): "preserveUserMessages: 2",
    ("Policy", "preserveUserTokens"): "preserveUserTokens: 9",
    ("Policy", "protectedMaxTokens"): "protectedMaxTokens: null",
    ("Policy", "summaryRole"): "summaryRole: assistant",
    ("Policy", "preStep"): "preStep: false",
    ("Policy", "lastResort"): "lastResort: forward",
    ("Policy", "strategies"): "strategies: [{kind: truncate}]",
    ("Policy", "pins"): "pins: {constraints: [x]}",
    ("Policy", "session"): "session: {headers: [x-c]}",
    ("Policy", "timing"): "timing: {gateWaitMs: 1}",
    ("Thresholds", "thresholdTokens"): "thresholds: {thresholdTokens: 5000}",
    ("Thresholds", "thresholdRatio"): "thresholds: {thresholdRatio: null}",
    ("Thresholds", "reserveTokens"): "thresholds: {reserveTokens: 1}",
    ("Thresholds", "minReclaimTokens"): "thresholds: {minReclaimTokens: 1}",
    ("Thresholds", "targetRatio"): "thresholds: {targetRatio: 0.3}",
    ("Pins", "constraints"): "pins: {constraints: [y]}",
    ("Session", "headers"): "session: {headers: [x-d]}",
    ("Session", "bodyFields"): "session: {bodyFields: [metadata.thread]}",
    ("Timing", "gateWaitMs"): "timing: {gateWaitMs: 2}",
    ("Timing", "inlineBudgetMs"): "timing: {inlineBudgetMs: 2}",
    ("Clear", "kind"): CLEAR % "keepToolUses: 3",
    ("Clear", "keepToolUses"): CLEAR % "keepToolUses: 9",
    ("Clear", "keepTokens"): CLEAR % "keepTokens: 9",
    ("Clear", "clearAtLeast"): CLEAR % "clearAtLeast: 9",
    ("Clear", "clearToolInputs"): CLEAR % "clearToolInputs: [edit]",
    ("Clear", "keepErrors"): CLEAR % "keepErrors: false",
    ("Clear", "excludeTools"): CLEAR % "excludeTools: [b]",
    ("Clear", "externalize"): CLEAR % "externalize: false",
    ("Clear", "previewChars"): CLEAR % "previewChars: 9",
    ("Summarize", "kind"): SUMMARIZE % "ledger: true",
    ("Summarize", "preserveRecentTurns"): SUMMARIZE % "preserveRecentTurns: 9",
    ("Summarize", "preserveRecentTokens"): SUMMARIZE % "preserveRecentTokens: 9",
    ("Summarize", "preserveUserMessages"): SUMMARIZE % "preserveUserMessages: 9",
    ("Summarize", "excludeTools"): SUMMARIZE % "excludeTools: [b]",
    ("Summarize", "summarizer"): SUMMARIZE % "summarizer: extractive",
    ("Summarize", "summarizerModel"): SUMMARIZE % "summarizerModel: small",
    ("Summarize", "summarizerTimeoutMs"): SUMMARIZE % "summarizerTimeoutMs: 9000",
    ("Summarize", "summarizerInputCharBudget"): SUMMARIZE % "summarizerInputCharBudget: 9000",
    ("Summarize", "summaryMaxTokens"): SUMMARIZE % "summaryMaxTokens: 900",
    ("Summarize", "ledger"): SUMMARIZE % "ledger: false",
    ("Summarize", "ledgerMaxTokens"): SUMMARIZE % "ledgerMaxTokens: 9",
    ("Summarize", "templateName"): SUMMARIZE % "templateName: default",
    ("Truncate", "kind"): TRUNCATE % "excludeTools: []",
    ("Truncate", "excludeTools"): TRUNCATE % "excludeTools: [b]",
    ("Truncate", "preserveUserMessages"): TRUNCATE % "preserveUserMessages: 9",
}


def test_every_policy_key_has_a_case() -> None:
    known = {
        (section.__name__, field.alias or name)
        for section in schema.sections(schema.Policy)
        for name, field in section.model_fields.items()
    }
    assert known == set(KEYS)


@pytest.mark.parametrize("key", sorted(KEYS), ids=".".join)
def test_every_policy_key_changes_the_policy(tmp_path: Path, key: tuple[str, str]) -> None:
    changed = policy(tmp_path, KEYS[key])
    if key == ("Summarize", "templateName"):
        assert (
            "templateName"
            in problems(
                tmp_path,
                HEAD + "policies: {mine: {strategies: [{kind: summarize-old-preserve-recent, templateName: other}]}}",
            )[0]
        )
        return
    bare = {"Clear": "keepToolUses: 3", "Summarize": "ledger: true", "Truncate": "excludeTools: []"}
    kinds = {"Clear": CLEAR, "Summarize": SUMMARIZE, "Truncate": TRUNCATE}
    base = kinds[key[0]] % bare[key[0]] if key[0] in kinds and key[1] != "kind" else "preset: balanced"
    assert changed.revision != policy(tmp_path, base).revision


def _watched(tmp_path: Path, file: Path) -> tuple[Watcher, list[Reload]]:
    seen: list[Reload] = []
    return Watcher(file, {}, load_settings(file, {}), seen.append), seen


def test_a_swapped_symlink_is_a_change_and_a_touched_file_is_none(tmp_path: Path) -> None:
    for name, limit in (("one", 5000), ("two", 6000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "proxy.yaml").write_text(f"policies: {{a: {{thresholds: {{thresholdTokens: {limit}}}}}}}\n")
    link = tmp_path / "current"
    link.symlink_to(tmp_path / "one")
    watcher, seen = _watched(tmp_path, link / "proxy.yaml")
    (tmp_path / "one" / "proxy.yaml").touch()
    assert watcher.poll() is None
    swapped = tmp_path / "next"
    swapped.symlink_to(tmp_path / "two")
    swapped.rename(link)
    assert watcher.poll() is not None
    assert seen[0].settings.policies["a"].thresholds.threshold_tokens == 6000


def test_a_broken_file_is_reported_and_the_one_before_stays(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text("policies: {a: {epoch: 1}}\n")
    watcher, seen = _watched(tmp_path, file)
    file.write_text("policies: {a: {epoch: x}}\n")
    watcher.poll()
    assert seen[0].problems
    assert "stays in force" in seen[0].lines()[-1]
    assert watcher.settings.policies["a"].epoch == 1
    file.write_text("policies: {a: {epoch: 2}}\nserver: {port: 1}\n")
    watcher.poll()
    assert seen[1].restart == ("server",)
    assert watcher.settings.policies["a"].epoch == 2
    assert watcher.settings.server.port == 8787


def test_the_built_in_configuration_passes_through_to_openai_on_loopback() -> None:
    settings = load_settings(None, {})
    assert settings.server.loopback
    assert [(route.match, route.policy) for route in settings.routes] == [("*", "balanced")]
    assert settings.providers["openai"].base_url == "https://api.openai.com/v1"
    assert {"balanced", "coding-agent", "support-chat", "zero-llm"} <= set(settings.policies)
