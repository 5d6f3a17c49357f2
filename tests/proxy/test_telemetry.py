"""Spans and metrics reach real receivers by the standard variables, and nothing is exported without one."""

from __future__ import annotations

import concurrent.futures
import json
import re
import socket
import subprocess
import sys
import time
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from compaction_proxy.config import TelemetrySettings
from compaction_proxy.exporters import metric_readers, span_exporters, switched_off
from compaction_proxy.prometheus import labels, metric_name
from compaction_proxy.telemetry import Telemetry

SETTINGS = TelemetrySettings("tested", capture_content=False)


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


def test_spans_arrive_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[bytes] = []

    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Sink(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Sink)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    telemetry = Telemetry(SETTINGS, {"OTEL_EXPORTER_OTLP_ENDPOINT": "set", "OTEL_METRICS_EXPORTER": "none"})
    one_request(telemetry)
    telemetry.shutdown()
    server.shutdown()
    server.server_close()
    thread.join()
    spans = [
        span
        for data in received
        for resource in trace_service_pb2.ExportTraceServiceRequest.FromString(data).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert [span.name for span in spans] == ["POST /v1/chat/completions"]
    assert spans[0].trace_id.hex() == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert spans[0].parent_span_id.hex() == "00f067aa0ba902b7"


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


def test_a_dead_collector_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    telemetry = Telemetry(SETTINGS, {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_METRICS_EXPORTER": "none"})
    started = time.monotonic()
    for _ in range(50):
        one_request(telemetry)
    assert time.monotonic() - started < 5
    telemetry.shutdown()
    assert time.monotonic() - started < 20


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
