"""Every key outside the policies changes the settings; a key without a case here fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compaction_proxy.config import Settings, load_settings, schema
from compaction_proxy.config.report import Sources

CLIENT = "server: {clientKeys: [{name: a, key: k, %s}]}"
PROVIDER = "providers: {openai: {baseUrl: https://api.openai.com/v1, %s}}"
MODEL = "models: [{match: '*', provider: openai, %s}]"
KEYS = {
    "Proxy.server": "server: {port: 1}",
    "Proxy.providers": "providers: {other: {baseUrl: https://x.org/v1}}",
    "Proxy.models": "models: [{match: a, provider: openai}]",
    "Proxy.store": "store: {url: 'memory://'}",
    "Proxy.telemetry": "telemetry: {captureContent: true}",
    "Proxy.policyFiles": "policyFiles: [one.yaml]",
    "Proxy.policies": "policies: {mine: {epoch: 1}}",
    "Server.host": "server: {host: '::1'}",
    "Server.port": "server: {port: 0}",
    "Server.maxBodyBytes": "server: {maxBodyBytes: 1024}",
    "Server.tenant": "server: {tenant: 'header:x-team'}",
    "Server.adminKey": "server: {adminKey: k}",
    "Server.trustedProxies": "server: {trustedProxies: [10.0.0.0/8]}",
    "Server.allowAnonymous": "server: {allowAnonymous: true}",
    "Server.clientKeys": "server: {clientKeys: [{name: a, key: k}]}",
    "ClientKey.name": "server: {clientKeys: [{name: b, key: k}]}",
    "ClientKey.key": "server: {clientKeys: [{name: a, key: other}]}",
    "ClientKey.policies": CLIENT % "policies: [zero-llm]",
    "Provider.kind": PROVIDER % "kind: openai",
    "Provider.baseUrl": "providers: {openai: {baseUrl: http://localhost:8000/v1}}",
    "Provider.apiKey": PROVIDER % "apiKey: k",
    "Provider.headers": PROVIDER % "headers: {x-a: b}",
    "Provider.timeouts": PROVIDER % "timeouts: {idleSeconds: 1}",
    "Timeouts.connectSeconds": PROVIDER % "timeouts: {connectSeconds: 1}",
    "Timeouts.firstByteSeconds": PROVIDER % "timeouts: {firstByteSeconds: 1.5}",
    "Timeouts.idleSeconds": PROVIDER % "timeouts: {idleSeconds: 2}",
    "Model.match": "models: [{match: 'gpt-*', provider: openai}]",
    "Model.provider": "providers: {a: {baseUrl: https://x.org/v1}}\nmodels: [{match: '*', provider: a}]",
    "Model.policy": MODEL % "policy: support-chat",
    "Model.contextWindow": MODEL % "contextWindow: 4096",
    "Store.url": "store: {url: 'unix:///run/redis.sock'}",
    "Store.stateDir": "store: {stateDir: state}",
    "Store.ttlSeconds": "store: {ttlSeconds: 1}",
    "Store.keepOriginals": "store: {keepOriginals: false}",
    "Store.originalsTtlSeconds": "store: {originalsTtlSeconds: 1}",
    "Store.secret": "store: {secret: s}",
    "Telemetry.serviceName": "telemetry: {serviceName: x}",
    "Telemetry.captureContent": "telemetry: {captureContent: true}",
}
ONLY_VALUE = {"Provider.kind"}
"""Keys with one value in this version: another one is refused (test_config_messages.py)."""
BASES = {"ClientKey": "server: {clientKeys: [{name: a, key: k}]}"}


def load(folder: Path, text: str) -> Settings:
    file = folder / "proxy.yaml"
    file.write_text(text + "\n", encoding="utf-8")
    (folder / "one.yaml").write_text("epoch: 1\n", encoding="utf-8")
    return replace(load_settings(file, {}), sources=Sources(), warnings=())


def test_every_key_has_a_case() -> None:
    known = {
        f"{section.__name__}.{field.alias or name}"
        for section in schema.sections()
        if section.family == "proxy"
        for name, field in section.model_fields.items()
    }
    assert known == set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_changes_the_settings(tmp_path: Path, key: str) -> None:
    base = load(tmp_path, BASES.get(key.partition(".")[0], "{}"))
    changed = load(tmp_path, KEYS[key])
    assert (changed == base) == (key in ONLY_VALUE)
