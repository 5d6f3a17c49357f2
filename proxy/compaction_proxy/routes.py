"""The HTTP surface: chat requests to the pipeline, every other ``/v1`` path forwarded as it is, health, metrics, originals."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Receive, Scope, Send

from compaction_policies import wire
from compaction_proxy import pipeline
from compaction_proxy.access import caller, check_admin
from compaction_proxy.config.settings import ProviderSettings, match_route
from compaction_proxy.errors import BadRequest, Expired, NotFound, ProxyError
from compaction_proxy.http import ClientGone, Request, read_request, run_until_disconnect
from compaction_proxy.relay import BrokenOff, Relayed, relay
from compaction_proxy.routing import default_provider
from compaction_proxy.services import Services
from compaction_proxy.upstream import request_headers

log = logging.getLogger(__name__)

CHAT_PATH = "/v1/chat/completions"
MAX_PAGE = 1_000_000

Endpoint = Callable[[Request, Send, Services], Coroutine[Any, Any, None]]


class Surface:
    """The ASGI endpoint behind every path of the proxy."""

    def __init__(self, services: Callable[[], Services]) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services()
        started = False

        async def watched_send(message: Any) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            request = await read_request(scope, receive, services.settings.server.max_body_bytes)
            endpoint = _endpoint(request)
            await run_until_disconnect(receive, endpoint(request, watched_send, services))
        except ClientGone:
            return
        except ProxyError as error:
            if started:
                raise
            await respond(send, error.status, error.to_response_bytes())
        except BrokenOff:
            raise
        except Exception:  # the documented edge: an answer in the API's error form, whatever went wrong
            if started:
                raise
            log.exception("request failed inside the proxy")
            await respond(send, 500, ProxyError("internal error in compaction-proxy").to_response_bytes())


def _endpoint(request: Request) -> Endpoint:
    path = request.path
    if path == CHAT_PATH and request.method == "POST":
        return chat
    if path == "/v1" or path.startswith("/v1/"):
        return forward
    if request.method in ("GET", "HEAD"):
        if path.startswith("/compaction/api/results/"):
            return result
        found = {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}.get(path)
        if found is not None:
            return found
    return missing


async def chat(request: Request, send: Send, services: Services) -> None:
    with services.telemetry.request_span(request.headers, request.method, request.path) as span:
        await pipeline.chat(request, send, services, span)


async def forward(request: Request, send: Send, services: Services) -> None:
    """Any other path under ``/v1``: the path after ``/v1`` is appended to the provider's ``baseUrl``."""
    settings = services.settings
    caller(settings.server, request.header, await pipeline.tenant_secret(services))
    provider = _provider(request, services)
    with services.telemetry.request_span(request.headers, request.method, request.path) as span:
        call = span.client(provider, "", stream=False)
        tracing = call.headers_out()
        names = {name for name, _ in tracing}
        headers = request_headers(
            provider,
            [(name, value) for name, value in request.headers if name not in names],
            strip_credentials=bool(settings.server.client_keys),
            same_body=True,
        )
        path = request.raw_path.decode("latin-1").removeprefix("/v1")
        relayed = Relayed()
        try:
            response = await services.upstream.send(
                provider, request.method, path, request.query, (*headers, *tracing), request.sent
            )
            await relay(response, send, (), relayed)
        finally:
            call.end(status=relayed.status)
            span.status(relayed.status)


def _provider(request: Request, services: Services) -> ProviderSettings:
    """A JSON body with ``model`` routes by ``models``; all else goes to the provider of the last ``*`` entry, else the first."""
    settings = services.settings
    model = ""
    if request.body and "json" in (request.header("content-type") or ""):
        try:
            spans = wire.object_spans(request.body)
            found = wire.value_of(request.body[slice(*spans["model"])]) if "model" in spans else ""
            model = found if isinstance(found, str) else ""
        except wire.Unreadable:
            model = ""
    route = match_route(settings.routes, model) if model else None
    return settings.providers[route.provider if route is not None else default_provider(settings)]


async def healthz(request: Request, send: Send, services: Services) -> None:
    await respond(send, 200, b'{"status":"ok"}')


async def readyz(request: Request, send: Send, services: Services) -> None:
    """200 also while the store is away: requests are served. The body says so."""
    degraded = services.records.store.degraded
    await respond(send, 200, json.dumps({"status": "degraded" if degraded else "ok"}).encode())


async def metrics(request: Request, send: Send, services: Services) -> None:
    body = services.telemetry.render_prometheus()
    await respond(send, 200, body, b"text/plain; version=0.0.4; charset=utf-8")


async def result(request: Request, send: Send, services: Services) -> None:
    """``GET /compaction/api/results/{handle}?offset=&limit=``: characters of a replaced original."""
    check_admin(services.settings.server, request.header, request.client)
    handle = request.path.rpartition("/")[2]
    offset, limit = _page(request.query)
    found = await services.records.read_original(handle) if handle.isalnum() else "unknown"
    if found == "unknown":
        message = f"no original is known under the handle '{handle[:64]}'"
        raise NotFound(message)
    if found == "expired":
        message = f"the original under the handle '{handle}' has expired (store.originalsTtlSeconds)"
        raise Expired(message)
    text = _original_text(found)
    page = text[offset : offset + limit]
    answer = {
        "handle": handle,
        "content": page,
        "offset": offset,
        "characters": len(page),
        "total_characters": len(text),
        "next_offset": offset + len(page) if offset + len(page) < len(text) else None,
    }
    await respond(send, 200, json.dumps(answer).encode())


def _page(query: bytes) -> tuple[int, int]:
    given = dict(pair.partition("=")[::2] for pair in query.decode("latin-1").split("&") if pair)
    unknown = sorted(set(given) - {"offset", "limit"})
    if unknown:
        message = f"unknown parameter '{unknown[0]}'; known: offset, limit"
        raise BadRequest(message, param=unknown[0])
    values = []
    for name, default, least, most in (("offset", 0, 0, 2**40), ("limit", MAX_PAGE, 1, MAX_PAGE)):
        text = given.get(name, str(default))
        if not text.isdecimal() or not least <= int(text[:13]) <= most:
            message = f"{name} must be a whole number from {least} to {most} (characters)"
            raise BadRequest(message, param=name)
        values.append(int(text[:13]))
    return values[0], values[1]


def _original_text(value: bytes) -> str:
    """An original is stored as the bytes of its JSON value: a string, or a list of content parts."""
    try:
        decoded = json.loads(value)
    except ValueError:
        return value.decode("utf-8", "replace")
    return decoded if isinstance(decoded, str) else value.decode("utf-8", "replace")


async def missing(request: Request, send: Send, services: Services) -> None:
    message = f"{request.method} {request.path} is not a path of this proxy; API paths begin with /v1"
    raise NotFound(message)


async def respond(send: Send, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
