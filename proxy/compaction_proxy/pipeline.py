"""One chat request, top to bottom: who asks -> route and policy -> shape the conversation -> forward -> relay -> settle.

What a conversation becomes is :mod:`compaction_proxy.shaping`'s business; this module knows HTTP, and no message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from starlette.types import Send

from compaction_policies import wire
from compaction_policies.policy import Mode, Policy, SummarizeOldPreserveRecent
from compaction_proxy.access import Caller, caller
from compaction_proxy.config.settings import ProviderSettings
from compaction_proxy.errors import BadRequest, LoopDetected, UpstreamError
from compaction_proxy.http import Request
from compaction_proxy.relay import Relayed, find_usage, relay
from compaction_proxy.routing import Destination, destination
from compaction_proxy.services import Services
from compaction_proxy.session import BODY_FIELDS, identify
from compaction_proxy.settle import Settled, settle
from compaction_proxy.shaping import Conversation, Shaped, unchanged
from compaction_proxy.summaries import ModelSummarizer, Reply
from compaction_proxy.telemetry import RequestSpan
from compaction_proxy.upstream import HOP_HEADER, RawHeaders, Response, credentials, request_headers

log = logging.getLogger(__name__)

CHAT = "chat/completions"
MODES = ("off", "shadow", "on", "force")


async def chat(request: Request, send: Send, services: Services, span: RequestSpan) -> None:
    """Answer one chat completions request. Raises ProxyError before the first byte; afterwards BrokenOff."""
    started = time.monotonic()
    who = caller(services.settings.server, request.header, await tenant_secret(services))
    body = Body.of(request)
    where = destination(services.settings, body.model, request.header("x-compaction-policy"), who.key)
    named = where.policy.session
    session = identify(request.header, body.session_fields(), named.headers, named.body_fields)
    shaped = await shape(request, body, who, where, session, services, span)
    span.compaction(shaped, where.policy)
    relayed = Relayed()
    overhead = time.monotonic() - started
    compacted = shaped.record is not None
    call = span.client(where.provider, body.model, stream=body.stream, compacted=compacted, session=session)
    try:
        response = await forward(request, shaped, where.provider, services, call.headers_out())
        await relay(response, send, response_headers(shaped), relayed)
    except UpstreamError as error:
        call.failed(error)
        raise
    finally:
        settle(Settled(request, body.model, where, shaped, relayed, overhead), services, span, call)


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Body:
    """A request's top-level fields by their places; none where the body is not a JSON object."""

    data: bytes
    fields: Mapping[str, wire.Span]

    @classmethod
    def of(cls, request: Request) -> Body:
        data = request.body or b""
        try:
            return cls(data, wire.object_spans(data))
        except wire.Unreadable:
            return cls(data, {})

    def value(self, name: str) -> Any:
        """The decoded field, ``None`` where it is absent or does not decode."""
        if name not in self.fields:
            return None
        try:
            return wire.value_of(self.data[slice(*self.fields[name])])
        except wire.Unreadable:
            return None

    @property
    def model(self) -> str:
        model = self.value("model")
        return model if isinstance(model, str) else ""

    @property
    def stream(self) -> bool:
        return self.value("stream") is True

    def session_fields(self) -> dict[str, Any]:
        return {name: self.value(name) for name in BODY_FIELDS if name in self.fields}


async def tenant_secret(services: Services) -> bytes:
    """The key of the tenants' hashes and of the originals' handles.

    Where the store fails it is one of this process: records are not found then, but no tenant sees another's either.
    """
    own = services.settings.store.secret
    if own is not None:
        return own.encode()
    try:
        return await services.records.secret()
    except Exception:  # the documented edge: a fault of the store never fails a user's request
        log.exception("the store gave no tenant key; one of this process stands in")
        return services.spare_secret


def asked_mode(request: Request, policy: Policy) -> tuple[Mode, bool]:
    """``(mode in force, forced)``: the header ``x-compaction`` overrides the policy. Raises :class:`BadRequest`."""
    said = request.header("x-compaction")
    if said is None or not said:
        return policy.mode, False
    if said == "force":
        return "on", True
    for mode in get_args(Mode):
        if said == mode:
            return mode, False
    message = f"x-compaction: '{said}' is not one of {', '.join(MODES)}"
    raise BadRequest(message, param="x-compaction")


# ---------------------------------------------------------------- the steps


async def shape(
    request: Request,
    body: Body,
    who: Caller,
    where: Destination,
    session: str | None,
    services: Services,
    span: RequestSpan,
) -> Shaped:
    """What goes upstream in place of the client's array."""
    mode, force = asked_mode(request, where.policy)
    if request.header(HOP_HEADER) is not None:
        if request.header(HOP_HEADER) != "1":
            message = "a summary call of this proxy came back to it more than once; check the providers' baseUrl"
            raise LoopDetected(message)
        return unchanged("disabled", detail="summary call")
    if request.body is None:
        return unchanged("unreadable", detail="content encoding")
    policy = replace(where.policy, mode=mode)
    conversation = Conversation(
        body=request.body,
        model=body.model,
        policy=policy,
        force=force,
        tenant=who.tenant,
        session=session,
        window=where.context_window or services.catalogue.context_window(body.model),
        tenant_secret=await tenant_secret(services),
        fields=body.fields,
        summarizer=summarizer(request, body.model, who, where, services, span),
    )
    return await services.shaper.shape(conversation)


async def forward(
    request: Request, shaped: Shaped, provider: ProviderSettings, services: Services, tracing: RawHeaders
) -> Response:
    """The request upstream: the client's bytes, or the shaped body."""
    same = shaped.body is None
    names = {name for name, _ in tracing}
    headers = request_headers(
        provider,
        [(name, value) for name, value in request.headers if name not in names],
        strip_credentials=bool(services.settings.server.client_keys),
        same_body=same,
    )
    if request.header(HOP_HEADER) is not None:
        headers = (*headers, (HOP_HEADER.encode(), b"2"))
    body = request.sent if shaped.body is None else shaped.body
    return await services.upstream.send(provider, "POST", CHAT, request.query, (*headers, *tracing), body)


def response_headers(shaped: Shaped) -> list[tuple[bytes, bytes]]:
    """What the proxy says about a request, beside the upstream's own headers."""
    headers = [(b"x-compaction", f"{shaped.outcome}; reason={shaped.reason}".encode())]
    if shaped.record is not None:
        headers.append((b"x-compaction-id", shaped.record.id.encode()))
    if shaped.tokens_before is not None and shaped.tokens_after is not None:
        headers.append((b"x-compaction-tokens", f"{shaped.tokens_before}/{shaped.tokens_after}".encode()))
    return headers


# ---------------------------------------------------------------- summaries


def summarizer(
    request: Request, model: str, who: Caller, where: Destination, services: Services, span: RequestSpan
) -> ModelSummarizer:
    """The summarizer of this request: the policy's model or the conversation's own, with the credential it may use."""
    strategy = next((s for s in where.policy.strategies if isinstance(s, SummarizeOldPreserveRecent)), None)
    name = (strategy.summarizer_model if strategy is not None else None) or model
    route = destination(services.settings, name, None, None)
    own_provider = route.provider.name == where.provider.name
    lent = own_provider and not services.settings.server.client_keys
    headers = credentials(request.headers) if lent else ()
    window = route.context_window or services.catalogue.context_window(name)
    return ModelSummarizer(
        route=SummaryRoute(name, route.provider, headers, services, span),
        constraints=where.policy.pins.constraints,
        window=window,
    )


@dataclass(frozen=True, slots=True)
class SummaryRoute:
    """A summarizer's calls: own model and credential, nothing of the client's parameters, marked against loops."""

    model: str
    provider: ProviderSettings
    lent: RawHeaders
    services: Services
    span: RequestSpan

    async def send(self, body: Mapping[str, Any], timeout_seconds: float) -> Reply:
        call = self.span.client(self.provider, self.model, stream=False, purpose="summary")
        headers = request_headers(self.provider, self.lent, strip_credentials=False, same_body=False)
        marked = (*headers, (b"content-type", b"application/json"), (HOP_HEADER.encode(), b"1"), *call.headers_out())
        try:
            status, data = await self.services.upstream.complete(self.provider, CHAT, body, marked, timeout_seconds)
        except UpstreamError as error:
            call.failed(error)
            call.end()
            return Reply(0, b"", error.code)
        call.end(status=status, usage=find_usage(data))
        return Reply(status, data)
