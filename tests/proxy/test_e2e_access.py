"""Whose data a request may see, whose credential goes where, and the paths around the chat endpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_e2e_compaction import CLEAR, SUMMARIZE, body
from test_e2e_sequences import echo, marks

from support.bench import assistant, loop, turns, user
from support.proxy import Running, config, running_proxy
from support.upstream import Reply, ScriptedUpstream, answer

LOOP = [user(0), *loop(1, 20, 150)]


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in more.items()}}


@pytest.mark.parametrize("tenant", ["credential", "header:x-team"])
async def test_naming_anothers_session_gives_nothing_of_it(tenant: str) -> None:
    upstream = ScriptedUpstream(summary=echo)
    async with (
        upstream.running(),
        running_proxy(config(upstream, policy=SUMMARIZE, tenant=tenant)) as proxy,
    ):
        opening = [user(1, 60), assistant(2, 60)]
        ids = set()
        for number, (key, team) in enumerate((("sk-one", "blue"), ("sk-two", "red")), 1):
            chat = [*opening, *turns(1_000 * number, 40, 60), user(500)]
            for _ in range(2):
                got = await proxy.post(body(chat), bearer(key, x_session_id="same", x_team=team))
                assert set(marks(upstream.requests[-1].messages)) == set(marks(chat))
                ids.add(got.headers["x-compaction-id"])
        assert len(ids) == 2
        stolen = [*opening, *turns(1_000, 40, 60), user(500)]
        got = await proxy.post(body(stolen), bearer("sk-two", x_session_id="same", x_team="red"))
        assert got.said == "compacted; reason=over-threshold", "even the very same words are another tenant's"
        assert len(upstream.summaries) == 3


async def test_originals_of_equal_text_have_a_handle_for_each_tenant() -> None:
    upstream = ScriptedUpstream()
    async with (
        upstream.running(),
        running_proxy(config(upstream, policy=CLEAR, tenant="credential")) as proxy,
    ):
        handles = []
        for key in ("sk-one", "sk-two", "sk-one"):
            await proxy.post(body(LOOP), bearer(key))
            sent = json.dumps(upstream.requests[-1].messages)
            handles.append(sent.partition("Stored as ")[2].partition(".]")[0])
        assert handles[0] == handles[2] != handles[1]
        for handle in handles:
            assert json.loads((await proxy.get(f"/compaction/api/results/{handle}")).body)["content"].startswith("m")


async def _handle(proxy: Running, upstream: ScriptedUpstream) -> str:
    await proxy.post(body(LOOP))
    return json.dumps(upstream.requests[-1].messages).partition("Stored as ")[2].partition(".]")[0]


async def test_admin_paths_answer_this_machine_alone_while_there_is_no_key() -> None:
    upstream = ScriptedUpstream()
    async with upstream.running(), running_proxy(config(upstream, policy=CLEAR)) as proxy:
        path = f"/compaction/api/results/{await _handle(proxy, upstream)}"
        assert (await proxy.get(path)).status == 200
        for forwarded in (
            {"x-forwarded-for": "8.8.8.8"},
            {"x-forwarded-for": "127.0.0.1"},
            {"forwarded": "for=8.8.8.8"},
        ):
            got = await proxy.get(path, forwarded)
            assert got.status == 403
            assert json.loads(got.body)["error"]["type"] == "compaction_proxy_error"
            assert b"lorem" not in got.body


async def test_an_original_that_is_a_list_of_parts_is_fetched_back_as_it_came_page_by_page() -> None:
    upstream = ScriptedUpstream()
    parts = [{"type": "text", "text": "caf\u00e9 \U0001f469 " * 200, "x": 1e3}]
    chat = [dict(message) for message in LOOP]
    chat[2]["content"] = parts
    async with upstream.running(), running_proxy(config(upstream, policy=CLEAR)) as proxy:
        await proxy.post(body(chat))
        sent = json.dumps(upstream.requests[0].messages[2])
        path = f"/compaction/api/results/{sent.partition('Stored as ')[2].partition('.]')[0]}"
        text, offset = "", 0
        while offset is not None:
            page = json.loads((await proxy.get(f"{path}?offset={offset}&limit=700")).body)
            assert len(page["content"]) <= 700
            text, offset = text + page["content"], page["next_offset"]
        assert page["total_characters"] == len(text)
        assert json.loads(text) == parts
        for wrong in ("offset=-1", "limit=x", "limit=0", "grep=a", "limit=1e3"):
            got = await proxy.get(f"{path}?{wrong}")
            assert (got.status, json.loads(got.body)["error"]["code"]) == (400, "bad_request")


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "api-key"])
async def test_a_client_key_never_goes_upstream_on_any_path(name: str) -> None:
    upstream = ScriptedUpstream(chat=lambda request: Reply.json({"data": []}))
    keys = ', clientKeys: [{name: a, key: "client-key-a"}]'
    given = {name: "Bearer client-key-a" if name == "authorization" else "client-key-a"}
    async with upstream.running(), running_proxy(config(upstream, server=keys)) as proxy:
        url = proxy.address
        async with proxy.http.post(url + "/v1/chat/completions", json=body([user(0)]), headers=given) as got:
            assert got.status == 200
        async with proxy.http.get(url + "/v1/models", headers=given) as got:
            assert got.status == 200
        async with proxy.http.post(url + "/v1/embeddings", json={"model": "e"}, headers={name: "wrong"}) as got:
            assert got.status == 401
    assert len(upstream.requests) == 2
    for request in upstream.requests:
        assert "client-key-a" not in repr(request)


async def test_a_body_with_a_model_goes_to_that_models_provider_on_every_path() -> None:
    upstream, elsewhere = ScriptedUpstream(), ScriptedUpstream()
    async with upstream.running(), elsewhere.running():
        text = config(upstream).replace(
            "models:\n",
            f'  other: {{kind: openai, baseUrl: "{elsewhere.address}/v1", apiKey: sk-other}}\n'
            'models:\n  - {match: "e-*", provider: other, policy: tested}\n',
        )
        async with running_proxy(text) as proxy:
            raw = b'{"model" : "e-large","input":"\\u00e9",  "n":1e400}'
            await proxy.post(raw, path="/v1/embeddings?x=a%2Fb")
            await proxy.post({"model": "gpt"}, path="/v1/responses")
            await proxy.post(b"not json", path="/v1/files/a%2Fb%20c//d")
            await proxy.post(body([user(0)], model="e-small"))
    assert [(request.target, request.body) for request in elsewhere.requests[:1]] == [("/v1/embeddings?x=a%2Fb", raw)]
    assert [request.target for request in elsewhere.requests[1:]] == ["/v1/chat/completions"]
    assert {request.header("authorization") for request in elsewhere.requests} == {"Bearer sk-other"}
    assert [request.target for request in upstream.requests] == ["/v1/responses", "/v1/files/a%2Fb%20c//d"]
    assert {request.header("authorization") for request in upstream.requests} == {"Bearer sk-client"}


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "PATCH", "OPTIONS"])
async def test_any_method_is_forwarded(method: str) -> None:
    upstream = ScriptedUpstream(chat=lambda request: Reply.json({}, 207, [("x-own", "1"), ("x-own", "2")]))
    async with upstream.running(), running_proxy(config(upstream)) as proxy:
        sent = b"" if method == "GET" else b"\x00raw"
        async with proxy.http.request(method, proxy.address + "/v1/files/f-1", data=sent) as got:
            assert (got.status, got.headers.getall("x-own")) == (207, ["1", "2"])
    assert [(request.method, request.target, request.body) for request in upstream.requests] == [
        (method, "/v1/files/f-1", sent)
    ]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/models"])
async def test_a_request_that_is_refused_is_answered_with_an_error_object(path: str) -> None:
    upstream = ScriptedUpstream()
    keys = ', clientKeys: [{name: a, key: "client-key-a"}]'
    async with upstream.running(), running_proxy(config(upstream, server=keys)) as proxy:
        for headers in ({"authorization": "Bearer nope"}, {"authorization": "nope"}, {"x-api-key": "client-key-a2"}):
            got = await proxy.post(body([user(0)]), {"authorization": "", **headers}, path=path)
            error: dict[str, Any] = json.loads(got.body)["error"]
            assert (got.status, error["type"], error["code"]) == (401, "compaction_proxy_error", "invalid_api_key")
            assert got.headers["content-type"] == "application/json"
    assert upstream.requests == []


@pytest.mark.parametrize("window", [4_096, 8_192])
@pytest.mark.parametrize("shape", ["turns", "tools"])
async def test_a_small_window_with_as_large_an_output_limit_is_no_event_on_every_request(
    window: int, shape: str
) -> None:
    upstream = ScriptedUpstream()
    async with (
        upstream.running(),
        running_proxy(config(upstream, limit=120_000, window=window)) as proxy,
    ):
        chat = [user(0)]
        events = over = 0
        for number in range(1, 60):
            got = await proxy.post(body(chat, max_tokens=window))
            sent = upstream.requests[-1].messages
            events += got.said.startswith("compacted")
            after = int(got.headers.get("x-compaction-tokens", "/0").partition("/")[2])
            over += after > window - window // 2
            assert sent[-1] == chat[-1]
            chat += [assistant(1_000 + number, 120), user(number, 120)] if shape == "turns" else loop(number, 1, 240)
        assert 2 <= events <= 20
        assert over <= 3, "the hard limit is the window less half of it"


@pytest.mark.parametrize("tokens", [20, 60, 100, 150, 300])
async def test_force_only_shrinks(tokens: int) -> None:
    """A summary that is longer than all that it stands for is asked for again, cut, and then perhaps not worth it."""
    upstream = ScriptedUpstream(summary=lambda request: answer("## State\n" + "longer than what it stands for " * 60))
    async with (
        upstream.running(),
        running_proxy(config(upstream, policy=SUMMARIZE, limit=100_000)) as proxy,
    ):
        given = body([user(0), assistant(1, tokens), user(2), assistant(3, tokens), user(4)], pad="x" * 1_100)
        got = await proxy.post(given, {"x-compaction": "force"})
        sent = upstream.requests[-1].messages
        if got.said.startswith("compacted"):
            before, after = map(int, got.headers["x-compaction-tokens"].split("/"))
            assert after < before
            assert len(json.dumps(sent)) < len(json.dumps(given["messages"]))
        else:
            assert sent == given["messages"]
        assert got.said.startswith("compacted") is (tokens >= 150)


async def test_force_ignores_thresholds_and_what_it_made_stays() -> None:
    upstream = ScriptedUpstream()
    async with (
        upstream.running(),
        running_proxy(config(upstream, policy=SUMMARIZE, limit=100_000)) as proxy,
    ):
        chat = [*turns(0, 40, 60), user(500)]
        assert (await proxy.post(body(chat))).said == "unchanged; reason=under-threshold"
        sizes = []
        for _ in range(4):
            got = await proxy.post(body(chat), {"x-compaction": "force"})
            assert got.status == 200
            sizes.append(len(upstream.requests[-1].body))
        assert sizes == sorted(sizes, reverse=True)
        later = await proxy.post(body([*chat, assistant(600), user(601)]))
        assert later.said == "sticky; reason=sticky"
        assert upstream.requests[-1].messages[:-2] == upstream.requests[-2].messages
