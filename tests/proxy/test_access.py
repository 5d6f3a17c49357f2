"""Who asks, which conversation, which policy: pure decisions, as tables."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from compaction_proxy.access import caller, check_admin, client_address
from compaction_proxy.config import ClientKey, Secret, ServerSettings, Settings, load_settings
from compaction_proxy.errors import BadRequest, Forbidden, ProxyError, Unauthorized
from compaction_proxy.routing import default_provider, destination
from compaction_proxy.session import identify

SERVER = load_settings(None, {}).server


def header(**given: str) -> Any:
    known = {name.replace("_", "-"): value for name, value in given.items()}
    return known.get


def tenant(server: ServerSettings, **headers: str) -> str:
    return caller(server, header(**headers), b"secret").tenant


def test_the_tenant_is_single_on_loopback_and_the_credential_elsewhere() -> None:
    assert tenant(SERVER, authorization="Bearer a") == tenant(SERVER, authorization="Bearer b") == "single"
    public = replace(SERVER, host="0.0.0.0")
    assert tenant(public, authorization="Bearer a") != tenant(public, authorization="Bearer b")
    assert tenant(public, authorization="Bearer a") == tenant(public, x_api_key="a") == tenant(public, api_key="a")
    assert "sk-very-secret" not in tenant(public, authorization="Bearer sk-very-secret")
    assert tenant(replace(public, tenant="single"), authorization="Bearer a") == "single"
    named = replace(public, tenant="header:x-team")
    assert tenant(named, x_team="blue") != tenant(named, x_team="red")
    assert caller(public, header(authorization="Bearer a"), b"other secret").tenant != tenant(
        public, authorization="Bearer a"
    )


def test_client_keys_name_the_tenant_whatever_their_value() -> None:
    keyed = replace(SERVER, client_keys=(ClientKey("a", Secret("k1")), ClientKey("b", Secret("k2"))))
    assert tenant(keyed, authorization="Bearer k1") == "k:a"
    assert tenant(keyed, x_api_key="k2") == "k:b"
    for wrong in (
        {},
        {"authorization": "Bearer nope"},
        {"authorization": "Bearer k1x"},
        {"authorization": "Bearer \xff"},
    ):
        with pytest.raises(Unauthorized):
            tenant(keyed, **wrong)


def test_admin_paths_want_their_key_or_this_machine() -> None:
    check_admin(SERVER, header(), "127.0.0.1")
    check_admin(SERVER, header(), "::1")
    with pytest.raises(Forbidden):
        check_admin(SERVER, header(), "10.0.0.7")
    with pytest.raises(Forbidden):
        check_admin(replace(SERVER, trusted_proxies=("127.0.0.1",)), header(x_forwarded_for="8.8.8.8"), "127.0.0.1")
    keyed = replace(SERVER, admin_key=Secret("adm"))
    check_admin(keyed, header(authorization="Bearer adm"), "10.0.0.7")
    check_admin(keyed, header(x_compaction_admin_key="adm"), "10.0.0.7")
    with pytest.raises(Unauthorized):
        check_admin(keyed, header(), "127.0.0.1")


def test_forwarded_addresses_are_believed_from_trusted_proxies_only() -> None:
    assert client_address("10.0.0.1", "1.2.3.4", ()) == "10.0.0.1"
    assert client_address("10.0.0.1", "1.2.3.4", ("10.0.0.0/8",)) == "1.2.3.4"
    assert client_address("10.0.0.1", "127.0.0.1, 1.2.3.4, 10.0.0.9", ("10.0.0.0/8",)) == "1.2.3.4"
    assert client_address("10.0.0.1", None, ("10.0.0.0/8",)) == "10.0.0.1"


def test_a_request_that_some_proxy_forwarded_is_not_from_this_machine() -> None:
    public = replace(SERVER, trusted_proxies=("10.0.0.5",))
    spoofed = header(x_forwarded_for="127.0.0.1,8.8.8.8")
    with pytest.raises(Forbidden):
        check_admin(public, spoofed, "10.0.0.5")
    for forwarded in (header(x_forwarded_for="127.0.0.1"), header(forwarded="for=127.0.0.1")):
        with pytest.raises(Forbidden, match="trustedProxies"):
            check_admin(SERVER, forwarded, "127.0.0.1")
    check_admin(replace(SERVER, trusted_proxies=("127.0.0.1",)), header(x_forwarded_for="127.0.0.1"), "127.0.0.1")


SESSIONS: list[tuple[dict[str, str], dict[str, Any], str | None]] = [
    ({}, {}, None),
    ({"x-compaction-session": "ours", "x-session-id": "x"}, {}, "ours"),
    ({"x-compaction-session": "  ", "x-session-id": "x"}, {}, "x"),
    ({"x-own": "own", "x-claude-code-session-id": "c"}, {}, "own"),
    ({}, {"metadata": {"thread": "t"}, "prompt_cache_key": "p"}, "t"),
    ({"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"}, {}, "c/a"),
    ({"thread-id": "t", "x-codex-window-id": "t:1"}, {}, "t/t:1"),
    ({"session-id": "s"}, {}, "s"),
    ({"x-session-id": "s", "session_id": "z"}, {}, "s"),
    ({"session_id": "z", "x-affinity": "a"}, {}, "z"),
    ({"x-affinity": "a"}, {"prompt_cache_key": "p"}, "a"),
    ({"x-session-affinity": "a"}, {}, "a"),
    ({}, {"prompt_cache_key": "p", "promptCacheKey": "q"}, "p"),
    ({}, {"promptCacheKey": "q"}, "q"),
    ({}, {"metadata": {"session_id": "m"}}, "m"),
    ({}, {"metadata": {"user_id": '{"session_id": "u"}'}}, "u"),
    ({}, {"metadata": {"user_id": "somebody"}}, None),
    ({}, {"user": "somebody", "safety_identifier": "x"}, None),
    ({}, {"prompt_cache_key": 7, "metadata": "no"}, None),
]


@pytest.mark.parametrize(("headers", "body", "expected"), SESSIONS)
def test_a_session_is_named_by_what_clients_really_send(
    headers: dict[str, str], body: dict[str, Any], expected: str | None
) -> None:
    assert identify(headers.get, body, ("x-own",), ("metadata.thread",)) == expected


def test_a_long_session_id_is_bounded() -> None:
    found = identify({"x-session-id": "s" * 5_000}.get, {}, (), ())
    assert found is not None
    assert len(found) <= 256


@pytest.fixture
def settings(tmp_path: Any) -> Settings:
    file = tmp_path / "proxy.yaml"
    file.write_text(
        "providers: {a: {baseUrl: https://a.org/v1}, b: {baseUrl: https://b.org/v1}}\n"
        "models: [{match: 'gpt-*', provider: b, policy: mine, contextWindow: 9000}, {match: '*', provider: a, policy: zero-llm}]\n"
        "policies: {mine: {}}\n"
    )
    return load_settings(file, {})


def test_the_first_matching_model_decides_and_headers_and_keys_precede_it(settings: Settings) -> None:
    where = destination(settings, "gpt-5", None, None)
    assert (where.provider.name, where.policy.name, where.context_window) == ("b", "mine", 9000)
    assert destination(settings, "llama", None, None).policy.name == "zero-llm"
    assert destination(settings, "llama", "mine", None).policy.name == "mine"
    key = ClientKey("k", Secret("x"), ("coding-agent", "mine"))
    assert destination(settings, "llama", None, key).policy.name == "coding-agent"
    assert destination(settings, "llama", "mine", key).policy.name == "mine"
    with pytest.raises(Forbidden, match="coding-agent"):
        destination(settings, "llama", "zero-llm", key)
    with pytest.raises(BadRequest, match="balanced"):
        destination(settings, "llama", "nope", None)
    assert default_provider(settings) == "a"


def test_every_error_is_an_openai_error_object() -> None:
    def classes(root: type[ProxyError]) -> list[type[ProxyError]]:
        return [root, *(found for child in root.__subclasses__() for found in classes(child))]

    for kind in classes(ProxyError):
        assert b'"type": "compaction_proxy_error"' in kind("why").to_response_bytes()
        assert 400 <= kind.status < 600
        assert kind.__name__ in (
            ProxyError.__module__ and __import__("compaction_proxy.errors", fromlist=["x"]).__doc__ or ""
        )


def test_a_dead_replicas_lock_expires_and_the_next_one_does_the_work() -> None:
    from compaction_proxy.store import MemoryStore
    from support.bench import Bench, turns, user

    async def play() -> None:
        now = [0.0]
        store = MemoryStore(clock=lambda: now[0])
        dead, alive = Bench(store=store), Bench(store=store)
        stuck, waiting = asyncio.Event(), asyncio.Event()

        async def never() -> None:
            stuck.set()
            await asyncio.Event().wait()

        dead.scribe.before = never
        chat = [*turns(0, 30), user(90)]
        lost = asyncio.ensure_future(dead.send(chat))
        await stuck.wait()
        asking = asyncio.ensure_future(alive.send(chat))
        asyncio.get_running_loop().call_later(0.3, waiting.set)
        await waiting.wait()
        assert alive.scribe.needs == []
        now[0] += 61
        sent = await asking
        assert sent.event
        assert len(alive.scribe.needs) == 1
        lost.cancel()

    asyncio.run(play())
