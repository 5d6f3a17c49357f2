"""Every key that a configuration may hold: type, range, default, unit and meaning. Nothing is read or resolved here.

The models are the one source of validation, of the JSON Schema for editors and of docs/configuration.md. Types are
strict: nothing is coerced. A policy's defaults are those of :mod:`compaction_policies.policy`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from compaction_policies import policy as core
from compaction_proxy.config.nodes import EnvText

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
STORE_SCHEMES = ("embedded", "memory", "redis", "rediss", "unix")
LATER_SCHEMES = ("redis+sentinel", "redis+cluster")
SECRET_KEYS = frozenset({"apiKey", "key", "adminKey", "secret", "headers", "url", "baseUrl"})
"""Keys whose values never appear in a message; ``headers`` of a policy's ``session`` are names, and shown nowhere either."""

_THRESHOLDS = core.Thresholds()
_CLEAR = core.ClearOldToolResults()
_SUMMARIZE = core.SummarizeOldPreserveRecent()
_POLICY = core.Policy(name="")
_TOKEN = re.compile(r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")
_ENV_PATTERN = r"^\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^}]*)?\}$"


def key(default: Any, meaning: str, *, unit: str = "", basic: bool = False, **limits: Any) -> Any:
    """One key: its default (``...`` = required), what it means, its unit, and whether docs show it first."""
    return Field(default, description=meaning, json_schema_extra={"x-unit": unit, "x-basic": basic}, **limits)


def problem(message: str, *, name_value: bool = False) -> PydanticCustomError:
    """A problem in words that are complete as they are, or (``name_value``) but for the value seen."""
    return PydanticCustomError("config", "{message}", {"message": message, "name_value": name_value})


class Section(BaseModel):
    """A mapping of known keys. ``place`` names it in messages; ``family`` = which sections may be confused with it."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, alias_generator=to_camel, hide_input_in_errors=True
    )
    place: ClassVar[str] = ""
    family: ClassVar[str] = "proxy"

    @model_validator(mode="before")
    @classmethod
    def _environment_values(cls, data: Any) -> Any:
        """A value that is one ``${VAR}`` is text where text is wanted, else what the YAML core rules make of it."""
        if not isinstance(data, dict):
            return data
        wanted = {field.alias or name: field.annotation for name, field in cls.model_fields.items()}
        return {name: _environment_value(value, wanted.get(name)) for name, value in data.items()}


def variants(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, else the annotation alone; ``Annotated`` is looked through."""
    if get_origin(annotation) is Annotated:
        return variants(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(member for part in get_args(annotation) for member in variants(part))
    return (annotation,)


def _environment_value(value: Any, annotation: Any) -> Any:
    if not isinstance(value, EnvText):
        return value
    members = variants(annotation)
    if str not in members:
        return value.core()
    return None if not value and type(None) in members else str(value)


def _host(url: str) -> str | None:
    """The host of a URL, ``None`` where there is none or the URL cannot be read."""
    try:
        parts = urlsplit(url)
        return parts.hostname if parts.port is None or parts.port else None
    except ValueError:
        return None


def _base_url(value: str) -> str:
    if not value.startswith(("http://", "https://")) or _host(value) is None:
        raise problem("expected a URL such as https://api.openai.com/v1")
    parts = urlsplit(value)
    if parts.username is not None:
        raise problem("holds credentials; put the key in apiKey")
    if parts.query or parts.fragment:
        raise problem("must not have a query or a fragment")
    return value.rstrip("/")


def _store_url(value: str) -> str:
    scheme, found, rest = value.partition("://")
    if scheme in LATER_SCHEMES:
        raise problem(f"'{scheme}' is not supported in this version; supported: {', '.join(STORE_SCHEMES)}")
    if not found or scheme not in STORE_SCHEMES:
        raise problem(f"store URL not supported; it begins with one of {', '.join(s + '://' for s in STORE_SCHEMES)}")
    if scheme in ("redis", "rediss") and _host(value) is None:
        raise problem(f"expected a host and perhaps a port, as in {scheme}://localhost:6379/0")
    if scheme == "unix" and not rest.startswith("/"):
        raise problem("expected an absolute path, as in unix:///run/redis.sock")
    return value


def _tenant(value: str) -> str:
    if value in ("auto", "credential", "single") or (value.startswith("header:") and _TOKEN.match(value[7:])):
        return value
    raise problem("expected 'auto', 'credential', 'single' or 'header:NAME'", name_value=True)


def _network(value: str) -> str:
    try:
        ipaddress.ip_network(value, strict=False)
    except ValueError:
        raise problem("expected an IP address or network such as 10.0.0.0/8", name_value=True) from None
    return value


def _headers(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not _TOKEN.match(name):
            raise problem(f"'{name}' is not a header name")
        if "\r" in text or "\n" in text:
            raise problem(f"the value of '{name}' holds a line break")
    return value


def _header_name(value: str) -> str:
    if not _TOKEN.match(value):
        raise problem("expected a header name such as x-conversation-id")
    return value


def _mode(value: Any) -> Any:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Text: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
Name: TypeAlias = Annotated[str, StringConstraints(pattern=NAME)]
Mode: TypeAlias = Annotated[
    Literal["off", "shadow", "on"],
    BeforeValidator(_mode),
    WithJsonSchema({"enum": ["off", "shadow", "on", False, True]}),
]
Ratio: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
Count: TypeAlias = Annotated[int, Field(ge=0)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
UserMessages: TypeAlias = Count | Literal["all"]


class Thresholds(Section):
    place = "'thresholds' of a policy"
    family = "policy"
    threshold_tokens: Positive | None = key(
        _THRESHOLDS.threshold_tokens,
        "Compact when the prompt is larger than this. `null`: only the ratio and the window count. "
        "Of all limits that are known the smallest counts.",
        unit="tokens",
        basic=True,
    )
    threshold_ratio: Ratio | None = key(
        _THRESHOLDS.threshold_ratio,
        "Compact when the prompt is larger than this share of the model's context window, where the window is known.",
        unit="share of the window, 0 to 1",
        basic=True,
    )
    reserve_tokens: Count = key(
        _THRESHOLDS.reserve_tokens,
        "Room kept free in the window beside the answer; at most a tenth of the window.",
        unit="tokens",
    )
    min_reclaim_tokens: Count = key(
        _THRESHOLDS.min_reclaim_tokens,
        "A compaction that would free less is not made; at most a sixteenth of the limit.",
        unit="tokens",
    )
    target_ratio: Ratio = key(
        _THRESHOLDS.target_ratio,
        "A compaction aims at this share of the limit. Above 0.7 compactions come too often to pay.",
        unit="share of the limit, 0 to 1",
    )


class Clear(Section):
    """Replace old tool results by a short placeholder. Needs no model."""

    place = "the strategy clear-old-tool-results"
    family = "policy"
    kind: Literal["clear-old-tool-results"] = key(..., "`clear-old-tool-results`.", basic=True)
    keep_tool_uses: Count = key(
        _CLEAR.keep_tool_uses, "The newest N tool results stay.", unit="tool results", basic=True
    )
    keep_tokens: Count = key(
        _CLEAR.keep_tokens, "Tool results within the newest N tokens of the conversation stay.", unit="tokens"
    )
    clear_at_least: Count = key(
        _CLEAR.clear_at_least,
        "Runs only if at least this much comes free; at most a quarter of the limit.",
        unit="tokens",
    )
    clear_tool_inputs: bool | list[Text] = key(
        _CLEAR.clear_tool_inputs,
        "Also shorten long strings in the arguments of cleared calls: `true`, `false`, or a list of tools (globs).",
    )
    keep_errors: bool = key(_CLEAR.keep_errors, "Results that report an error stay.")
    exclude_tools: list[Text] = key([], "Tools (names or globs) whose results stay, in addition to the policy's.")
    externalize: bool = key(
        _CLEAR.externalize,
        "Keep the original in the store and name its handle in the placeholder (see `keepOriginals`).",
    )
    preview_chars: Count = key(
        _CLEAR.preview_chars, "This much of the original's beginning stays in the placeholder.", unit="characters"
    )


class Summarize(Section):
    """One summary in place of the old part of the conversation; the recent part stays verbatim."""

    place = "the strategy summarize-old-preserve-recent"
    family = "policy"
    kind: Literal["summarize-old-preserve-recent"] = key(..., "`summarize-old-preserve-recent`.", basic=True)
    preserve_recent_turns: Count = key(
        _SUMMARIZE.preserve_recent_turns,
        "The newest N turns (a turn starts at a user message) stay whole where they fit.",
        unit="turns",
        basic=True,
    )
    preserve_recent_tokens: Positive = key(
        _SUMMARIZE.preserve_recent_tokens,
        "At most this much stays verbatim at the end; never less than the newest message with its tool results.",
        unit="tokens",
        basic=True,
    )
    preserve_user_messages: UserMessages | None = key(
        _SUMMARIZE.preserve_user_messages, "Overrides the policy's `preserveUserMessages`; `null`: the policy's."
    )
    exclude_tools: list[Text] = key([], "Tools (names or globs) that are not summarized, in addition to the policy's.")
    summarizer: Literal["model", "extractive"] = key(
        _SUMMARIZE.summarizer, "Who writes the summary: a model, or `extractive`: rules, without any model.", basic=True
    )
    summarizer_model: Text | None = key(
        _SUMMARIZE.summarizer_model,
        "The model that writes summaries, routed by `models`; `null`: the conversation's own model.",
        basic=True,
    )
    summarizer_timeout_ms: Positive = key(
        _SUMMARIZE.summarizer_timeout_ms, "How long one summarizer call may take.", unit="milliseconds"
    )
    summarizer_input_char_budget: Positive | None = key(
        _SUMMARIZE.summarizer_input_char_budget,
        "How much text one summarizer call is given; `null`: from the summarizer's window, else 96,000.",
        unit="characters",
    )
    summary_max_tokens: Positive = key(
        _SUMMARIZE.summary_max_tokens, "Largest summary; at most an eighth of the limit.", unit="tokens"
    )
    ledger: bool = key(
        _SUMMARIZE.ledger,
        "List exact paths, identifiers, numbers, URLs and error codes of the summarized part beside the summary.",
    )
    ledger_max_tokens: Count = key(
        _SUMMARIZE.ledger_max_tokens, "Largest ledger; at most a twelfth of the limit.", unit="tokens"
    )
    template_name: Literal["default"] = key(_SUMMARIZE.template_name, "The prompt template of the summarizer.")


class Truncate(Section):
    """Drop the oldest messages while the prompt is above the limit. Needs no model."""

    place = "the strategy truncate"
    family = "policy"
    kind: Literal["truncate"] = key(..., "`truncate`.", basic=True)
    exclude_tools: list[Text] = key(
        [], "Tools (names or globs) whose calls are not dropped, in addition to the policy's."
    )
    preserve_user_messages: UserMessages | None = key(
        None, "Overrides the policy's `preserveUserMessages`; `null`: the policy's."
    )


Strategy: TypeAlias = Annotated[Clear | Summarize | Truncate, Field(discriminator="kind")]


class Pins(Section):
    place = "'pins' of a policy"
    family = "policy"
    constraints: list[Text] = key([], "Sentences whose exact words stand in every summary message.")


class Session(Section):
    place = "'session' of a policy"
    family = "policy"
    headers: list[Annotated[str, AfterValidator(_header_name)]] = key(
        [], "Request headers that name the conversation, asked in this order before those of known clients."
    )
    body_fields: list[Text] = key([], "Fields of the request body that name it, dotted (`metadata.thread_id`).")


class Timing(Section):
    place = "'timing' of a policy"
    family = "policy"
    gate_wait_ms: Count = key(
        10_000, "How long a request waits for a summary that another request has started.", unit="milliseconds"
    )
    inline_budget_ms: Count = key(
        25_000, "How long a request waits for the summary that it has started itself.", unit="milliseconds"
    )


class Policy(Section):
    place = "a policy"
    family = "policy"
    preset: Name | None = key(
        None,
        "What this policy is based on: a shipped preset or another policy; none: `balanced`. "
        "Maps merge key by key, lists replace.",
        basic=True,
    )
    mode: Mode = key(
        _POLICY.mode,
        "`on`; `off`: forward everything unchanged; `shadow`: decide and report, forward unchanged.",
        basic=True,
    )
    epoch: Count = key(_POLICY.epoch, "Raise it to retire every earlier compaction of this policy.")
    thresholds: Thresholds | Literal["never"] = key(
        Thresholds(),
        "When to compact, and how far; `never`: no new compactions, earlier ones stay in force.",
        basic=True,
    )
    exclude_tools: list[Text] = key(
        [],
        "Tools (names or globs) whose results no strategy touches, up to `protectedMaxTokens`.",
        basic=True,
    )
    preserve_user_messages: UserMessages = key(
        _POLICY.preserve_user_messages,
        "User messages carried word for word through every summary: `all` or the newest N, within `preserveUserTokens`.",
        basic=True,
    )
    preserve_user_tokens: Count = key(
        _POLICY.preserve_user_tokens,
        "Budget of the carried user messages; at most a quarter of the limit.",
        unit="tokens",
    )
    protected_max_tokens: Count | Literal["auto"] | None = key(
        _POLICY.protected_max_tokens,
        "Bound of what is kept as originals (results of `excludeTools`, later system messages): a number, "
        "`auto`: a quarter of the target, `null`: none.",
        unit="tokens",
    )
    summary_role: Literal["user", "assistant"] = key(_POLICY.summary_role, "Role of the summary message.")
    pre_step: bool = key(_POLICY.pre_step, "A compaction may start inside a tool loop, not only at a user message.")
    last_resort: Literal["truncate", "forward"] = key(
        _POLICY.last_resort,
        "When nothing gets the prompt into the model's window: `truncate` drops the oldest, "
        "`forward` lets the provider answer.",
    )
    strategies: list[Strategy] = key(
        [], "What to do, in this order, until the target is met.", basic=True, min_length=1
    )
    pins: Pins = key(Pins(), "What every summary message repeats.")
    session: Session = key(Session(), "Where the conversation's id is found.")
    timing: Timing = key(Timing(), "How long a request waits for a summary.")


_declare = key
"""The same under a name that no field takes."""


class ClientKey(Section):
    place = "an entry of 'clientKeys'"
    name: Name = key(..., "Name of the client: its tenant, shown in traces.")
    key: Text = key(..., "What the client sends as its bearer token.")
    policies: list[Name] = _declare(
        [],
        "The policies it may ask for in `x-compaction-policy`; the first is used by itself. "
        "Empty: the model's policy, and any may be asked for.",
    )


class Server(Section):
    place = "'server'"
    host: Text = key("127.0.0.1", "Address to listen on.", basic=True)
    port: Annotated[int, Field(ge=0, le=65535)] = key(8787, "Port to listen on; 0: any free one.", basic=True)
    max_body_bytes: Annotated[int, Field(ge=1024)] = key(67_108_864, "Largest request body.", unit="bytes")
    tenant: Annotated[str, AfterValidator(_tenant)] = key(
        "auto",
        "What separates conversations: `credential` (a hash of the client's), `header:NAME`, `single`, or `auto`: "
        "the client key's name, else `single` on loopback, else `credential`.",
    )
    admin_key: Text | None = key(None, "Bearer token of `/compaction/api/`; `null`: from loopback only.")
    trusted_proxies: list[Annotated[str, AfterValidator(_network)]] = key(
        [], "Addresses or networks whose `X-Forwarded-*` headers are believed."
    )
    allow_anonymous: bool = key(
        False, "Let anybody who reaches a non-loopback address use the providers' keys without a client key."
    )
    client_keys: list[ClientKey] = key([], "Who may use the proxy. Empty: the client's own credential goes upstream.")


class Timeouts(Section):
    place = "'timeouts' of a provider"
    connect_seconds: Seconds = key(10, "For the connection.", unit="seconds")
    first_byte_seconds: Seconds = key(600, "Until the answer begins.", unit="seconds")
    idle_seconds: Seconds = key(600, "Between two pieces of the answer.", unit="seconds")


class Provider(Section):
    place = "a provider"
    kind: Literal["openai"] = key(
        "openai", "`openai`: any server that speaks the OpenAI API; requests go there as they are."
    )
    base_url: Annotated[str, AfterValidator(_base_url)] = key(
        ..., "Where the API is, `/v1` included: the path after `/v1` is appended.", basic=True
    )
    api_key: Text | None = key(None, "Key sent to the provider; `null`: the client's own credential.", basic=True)
    headers: Annotated[dict[str, str], AfterValidator(_headers)] = key({}, "Headers added to every request.")
    timeouts: Timeouts = key(Timeouts(), "How long the provider may take.")


class Model(Section):
    place = "an entry of 'models'"
    match: Text = key(..., "Model names, a glob; the first entry that matches is used.", basic=True)
    provider: Name = key(..., "A name under `providers`.", basic=True)
    policy: Name | None = key(
        None, "A policy or a preset; none: `default` if there is one, else `balanced`.", basic=True
    )
    context_window: Positive | None = key(
        None, "The model's context window; `null`: from the catalogue.", unit="tokens"
    )


class Store(Section):
    place = "'store'"
    url: Annotated[str, AfterValidator(_store_url)] = key(
        "embedded://",
        "`embedded://` (a Valkey that the proxy starts), `memory://`, `redis://HOST:PORT/DB`, `rediss://...`, "
        "`unix:///PATH`.",
        basic=True,
    )
    state_dir: Text | None = key(
        None, "Folder of the embedded store, relative to this file; `null`: the user's state folder."
    )
    ttl_seconds: Positive = key(604_800, "A compaction that nobody uses is forgotten after this time.", unit="seconds")
    keep_originals: bool = key(True, "Keep what was replaced, so that it can be fetched back.")
    originals_ttl_seconds: Positive = key(86_400, "For this long.", unit="seconds")
    secret: Text | None = key(
        None, "Key of the hashes in store keys and handles; `null`: made once, kept in the store."
    )


class Telemetry(Section):
    place = "'telemetry'"
    service_name: Text = key("compaction-proxy", "`service.name` of traces and metrics.")
    capture_content: bool = key(False, "Put message text into spans.")


class Proxy(Section):
    place = "the configuration"
    server: Server = key(Server(), "The proxy itself.")
    providers: dict[Name, Provider] = key({}, "Where requests go, by name. None: `openai`.", basic=True)
    models: list[Model] = key(
        [], "Which model goes where under which policy. None: all to the first provider.", basic=True
    )
    store: Store = key(Store(), "Where compactions are kept.")
    telemetry: Telemetry = key(Telemetry(), "Traces and metrics; the standard `OTEL_*` variables say where they go.")
    policy_files: list[Text] = key(
        [], "More policies, one per file, named by the file; globs relative to this file.", basic=True
    )
    policies: dict[Name, Policy] = key({}, "Policies by name.", basic=True)


def sections(root: type[Section] = Proxy) -> Iterator[type[Section]]:
    """The section itself and every section below it, each once."""
    seen: dict[type[Section], None] = {}

    def walk(section: type[Section]) -> None:
        if section in seen:
            return
        seen[section] = None
        for field in section.model_fields.values():
            for child in children(field.annotation):
                walk(child)

    walk(root)
    yield from seen


def children(annotation: Any) -> tuple[type[Section], ...]:
    """The sections that an annotation may hold, inside lists and maps too."""
    found: list[type[Section]] = []
    for member in variants(annotation):
        if isinstance(member, type) and issubclass(member, Section):
            found.append(member)
        elif get_origin(member) in (list, dict):
            found.extend(children(get_args(member)[-1]))
    return tuple(found)


class EditorSchema(GenerateJsonSchema):
    """JSON Schema for editors: a number or a switch may also be written as one ``${VAR}``."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def int_schema(self, schema: core_schema.IntSchema) -> JsonSchemaValue:
        return _or_variable(super().int_schema(schema))

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return _or_variable(super().float_schema(schema))

    def bool_schema(self, schema: core_schema.BoolSchema) -> JsonSchemaValue:
        return _or_variable(super().bool_schema(schema))


def _or_variable(schema: JsonSchemaValue) -> JsonSchemaValue:
    return {"anyOf": [schema, {"type": "string", "pattern": _ENV_PATTERN}]}


def json_schema(policy: bool = False) -> dict[str, Any]:
    """JSON Schema (2020-12) of ``proxy.yaml``, or of one policy file."""
    root, title = (Policy, "compaction-proxy policy") if policy else (Proxy, "compaction-proxy configuration")
    schema = root.model_json_schema(by_alias=True, schema_generator=EditorSchema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}
