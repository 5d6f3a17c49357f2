"""Spans and metrics reach real receivers by the standard variables, and nothing is exported without one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import re
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from compaction_proxy.config import TelemetrySettings
from compaction_proxy.config.settings import ProviderSettings, Secret, Timeouts
from compaction_proxy.errors import BadRequest, UpstreamTimeout
from compaction_proxy.exporters import metric_readers, span_exporters, switched_off
from compaction_proxy.prometheus import labels, metric_name, number
from compaction_proxy.relay import Usage
from compaction_proxy.telemetry import Telemetry
from compaction_proxy.telemetry.words import MAX_CHARS, attributes, provider_attributes, request_name

SETTINGS = TelemetrySettings("tested", capture_content=False)
PROVIDER = ProviderSettings(
    "acme", "openai", "https://user:SECRET@models.example:8443/v1?key=SECRET", None, {}, Timeouts(1, 1, 1)
)
CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Sink:
    """A tracing backend that takes OTLP over HTTP."""

    def __init__(self) -> None:
        self._received: list[bytes] = []
        received = self._received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Sink:
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def spans(self) -> list[Any]:
        return [
            span
            for data in self._received
            for resource in trace_service_pb2.ExportTraceServiceRequest.FromString(data).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def text(self) -> str:
        return b"".join(self._received).decode("latin-1")


def exporting(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> Telemetry:
    """Telemetry that exports to a sink. The SDK reads the endpoint from the process environment."""
    known = {"OTEL_EXPORTER_OTLP_ENDPOINT": sink.endpoint, "OTEL_METRICS_EXPORTER": "none"}
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.endpoint)
    return Telemetry(SETTINGS, known)


def said(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def one_request(telemetry: Telemetry) -> None:
    parent = [(b"traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")]
    with telemetry.request_span(parent, "POST", "/v1/chat/completions") as span:
        assert span.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"
        span.status(200)


def test_nothing_is_exported_unless_a_variable_asks_for_it() -> None:
    assert span_exporters({}) == []
    assert metric_readers({}) == []
    assert span_exporters({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}) == []
    assert switched_off({"OTEL_SDK_DISABLED": "true"})


def test_an_unknown_exporter_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert span_exporters({"OTEL_TRACES_EXPORTER": "zipkin"}) == []
    assert "zipkin" in caplog.text


def test_the_trace_of_the_caller_passes_through_without_tracing_of_ours() -> None:
    telemetry = Telemetry(SETTINGS)
    with telemetry.request_span(
        [(b"traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")], "GET", "/"
    ) as span:
        assert span.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"
    with telemetry.request_span([(b"traceparent", b"junk")], "GET", "/") as span:
        assert span.trace_id is None
    telemetry.shutdown()


def test_spans_arrive_over_http_as_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sink() as sink:
        telemetry = exporting(sink, monkeypatch)
        headers = [(b"traceparent", CALLER.encode()), (b"tracestate", b"vendor=1"), (b"authorization", b"SECRET")]
        with telemetry.request_span(headers, "POST", "/v1/chat/completions") as span:
            call = span.client(PROVIDER, "gpt-5", stream=True, compacted=True, session="s-1")
            sent = dict(call.headers_out())
            call.end(status=200, usage=Usage(21, 2, 8))
            call.end(status=500)
            span.status(200)
        telemetry.shutdown()
        spans = {span.name: span for span in sink.spans()}
        text = sink.text()
    assert sorted(spans) == ["POST /v1/chat/completions", "chat gpt-5"]
    server, client = spans["POST /v1/chat/completions"], spans["chat gpt-5"]
    assert {span.trace_id.hex() for span in spans.values()} == {CALLER.split("-")[1]}
    assert server.parent_span_id.hex() == CALLER.split("-")[2]
    assert client.parent_span_id == server.span_id
    assert sent[b"traceparent"].decode() == f"00-{CALLER.split('-')[1]}-{client.span_id.hex()}-01"
    assert sent[b"tracestate"] == b"vendor=1"
    assert said(client) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "acme",
        "gen_ai.request.model": "gpt-5",
        "gen_ai.request.stream": True,
        "gen_ai.conversation.id": "s-1",
        "gen_ai.conversation.compacted": True,
        "gen_ai.usage.input_tokens": 21,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "server.address": "models.example",
        "server.port": 8443,
        "http.response.status_code": 200,
    }
    assert "SECRET" not in text


def test_a_name_that_no_exporter_can_encode_loses_no_span_and_no_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sink() as sink:
        telemetry = exporting(sink, monkeypatch)
        with telemetry.request_span([], "POST", "/v1/chat/completions") as span:
            span.client(PROVIDER, "\ud800" + "m" * 100_000, stream=False, session="\udfff").end(status=200)
        page = telemetry.render_prometheus()
        telemetry.shutdown()
        spans = sink.spans()
    assert len(spans) == 2
    assert b'gen_ai_request_model="?mmm' in page
    assert len(sink.text()) < 4_000


def test_a_trace_that_the_caller_does_not_sample_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sink() as sink:
        telemetry = exporting(sink, monkeypatch)
        with telemetry.request_span([(b"traceparent", CALLER[:-1].encode() + b"0")], "POST", "/v1/models") as span:
            call = span.client(PROVIDER, "m", stream=False)
            assert dict(call.headers_out())[b"traceparent"].decode().endswith("-00")
            call.end(status=200)
        telemetry.shutdown()
        assert sink.spans() == []


def test_who_is_at_fault_shows_in_the_status() -> None:
    finished = InMemorySpanExporter()
    telemetry = Telemetry(SETTINGS, exporters=[finished])
    for error in (BadRequest("no"), UpstreamTimeout("late"), ValueError("SECRET"), asyncio.CancelledError()):
        with pytest.raises(type(error)), telemetry.request_span([], "POST", "/v1/chat/completions"):
            raise error
    telemetry.shutdown()
    spans = [(dict(span.attributes or {}), span.status) for span in finished.get_finished_spans()]
    assert [known.get("error.type") for known, _ in spans] == [
        "BadRequest",
        "UpstreamTimeout",
        "ValueError",
        "CancelledError",
    ]
    assert [known.get("http.response.status_code") for known, _ in spans] == [400, 504, None, None]
    assert [status.is_ok for _, status in spans] == [True, False, False, True]
    assert all(status.description is None for _, status in spans)
    assert "SECRET" not in "".join(span.to_json() for span in finished.get_finished_spans())


def test_only_names_of_the_table_with_values_of_their_type_are_recorded() -> None:
    assert attributes(
        {
            "authorization": "SECRET",
            "compaction.policy": Secret("SECRET"),
            "compaction.covers": True,
            "compaction.degraded": 1,
            "compaction.generation": None,
            "compaction.content": "SECRET",
            "compaction.id": "x" * 1_000,
            "compaction.tokens_before": 5,
        }
    ) == {"compaction.id": "x" * MAX_CHARS, "compaction.tokens_before": 5}


def test_few_names_name_the_spans() -> None:
    assert request_name("POST", "/v1/chat/completions") == "POST /v1/chat/completions"
    assert request_name("GET", "/v1/files/file-123") == "GET"
    assert request_name("SECRET", "/v1/models") == "HTTP /v1/models"


def test_a_call_without_a_model_is_no_model_call() -> None:
    finished = InMemorySpanExporter()
    telemetry = Telemetry(SETTINGS, exporters=[finished])
    with telemetry.request_span([], "GET", "/v1/models") as span:
        span.client(PROVIDER, "", stream=False).end(status=200)
    page = telemetry.render_prometheus()
    telemetry.shutdown()
    assert [span.name for span in finished.get_finished_spans()] == ["forward", "GET /v1/models"]
    assert b"gen_ai" not in page
    assert provider_attributes(PROVIDER, "") == {"server.address": "models.example", "server.port": 8443}


def test_spans_arrive_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    class Sink(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            names.extend(span.name for r in request.resource_spans for s in r.scope_spans for span in s.spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Sink(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    known = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "set",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_METRICS_EXPORTER": "none",
    }
    telemetry = Telemetry(SETTINGS, known)
    one_request(telemetry)
    telemetry.shutdown()
    server.stop(1).wait()
    assert names == ["POST /v1/chat/completions"]


def test_the_console_exporter_prints_spans() -> None:
    code = (
        "from compaction_proxy.telemetry import Telemetry; from compaction_proxy.config import TelemetrySettings as S;"
        "t = Telemetry(S('x', False), {'OTEL_TRACES_EXPORTER': 'console'});"
        "s = t.request_span([], 'GET', '/v1/models'); s.__exit__(None, None, None); t.shutdown()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["name"] == "GET /v1/models"


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_collector_that_hangs_holds_neither_a_request_nor_the_end_of_the_process(protocol: str) -> None:
    """It takes connections and answers nothing; an export would wait ten minutes, longer than this test may."""
    code = (
        "import os; from compaction_proxy.telemetry import Telemetry; from compaction_proxy.config import TelemetrySettings as S\n"
        "t = Telemetry(S('x', False), os.environ)\n"
        "for _ in range(600):\n"
        "    with t.request_span([], 'GET', '/v1/models') as s: s.status(200)\n"
        "t.shutdown()\n"
        "print('ended')"
    )
    with socket.socket() as collector:
        collector.bind(("127.0.0.1", 0))
        collector.listen(50)
        known = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_TIMEOUT": "600",
        }
        done = subprocess.run(
            [sys.executable, "-c", code], env=known, capture_output=True, text=True, check=True, timeout=60
        )
    assert done.stdout.strip() == "ended"
    assert "dropped" in done.stderr


def test_a_wrong_variable_of_an_exporter_is_told_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    assert span_exporters({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) == []
    assert "OTEL_EXPORTER_*" in caplog.text


def test_counters_keep_every_digit_and_durations_have_buckets_of_their_size() -> None:
    telemetry = Telemetry(SETTINGS)
    telemetry.book_call("p", "m", 0.3, Usage(123_456_789, 1, 0), None)
    text = telemetry.render_prometheus().decode()
    telemetry.shutdown()
    buckets = dict(re.findall(r'operation_duration_seconds_bucket\{.*le="([^"]+)"\} (\d+)', text))
    assert buckets["0.16"] == "0"
    assert buckets["0.32"] == "1"
    assert re.search(r'token_usage_sum\{.*"input"\} 123456789\n', text)
    assert [number(0.1), number(1e21), number(3.0)] == ["0.1", "1000000000000000000000", "3"]


def test_prometheus_text_is_well_formed() -> None:
    telemetry = Telemetry(SETTINGS)
    telemetry.book_call("p", 'a"b\\c', 0.3, None, None)
    text = telemetry.render_prometheus().decode()
    telemetry.shutdown()
    assert 'gen_ai_client_operation_duration_seconds_count{gen_ai_operation_name="chat"' in text
    line = re.compile(r'[a-z_]+(?:\{(?:[a-z_]+="(?:[^"\\]|\\.)*",?)*\})? [-+0-9.e]+(?:Inf)?')
    for each in text.splitlines():
        assert each.startswith("# ") or line.fullmatch(each), each
    assert (
        metric_name("context.compaction.skipped.total", "{request}", counter=True) == "context_compaction_skipped_total"
    )
    assert labels({"b": 1, "a.x": "q\n"}) == '{a_x="q\\n",b="1"}'
