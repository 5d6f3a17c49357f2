"""The command line as a person uses it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import jsonschema
import yaml
from click.testing import CliRunner

from compaction_proxy.cli import main
from support.valkey import wait_until

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.output


def running(words: str) -> list[str]:
    """The command lines, of the processes that run now, that hold these words; read without procps."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in lines if words in line]


def test_check_says_ok_or_every_problem(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("policies: {a: {preset: balanced}}\n")
    bad.write_text("servr: {}\npolicies: {a: {preset: none}}\n")
    assert run("check", str(good)) == (0, f"{good}: ok (1 policy)\n")
    code, output = run("check", str(good), str(bad))
    assert code == 2
    assert f"{bad}:1:1: servr" in output
    assert "preset" in output
    code, output = run("check", str(tmp_path / "missing.yaml"))
    assert code == 2


def test_check_effective_names_the_origin_of_each_value(tmp_path: Path) -> None:
    file = tmp_path / "support.yaml"
    file.write_text("preset: support-chat\nthresholds:\n  thresholdTokens: 9000\n")
    code, output = run("check", "--effective", str(file))
    assert code == 0
    assert f"thresholdTokens: 9000  # {file}:3:20" in output
    assert "preserveRecentTurns: 6  # preset support-chat:" in output
    assert "targetRatio: 0.5  # default" in output
    assert yaml.safe_load(output)["support"]["strategies"][0]["preserveRecentTurns"] == 6


def test_check_warns_of_policies_that_never_fire_and_of_text_that_goes_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(
        "providers: {a: {baseUrl: https://a.org/v1}, b: {baseUrl: https://b.org/v1}}\n"
        "models: [{match: acme-9, provider: a, policy: p}, {match: small, provider: b, policy: p}]\n"
        "policies: {p: {thresholds: {thresholdTokens: null}, strategies: [{kind: summarize-old-preserve-recent, summarizerModel: small}]}}\n"
    )
    code, output = run("check", str(file))
    assert code == 0
    assert "never compacts" in output
    assert "goes to 'b' for summaries" in output
    assert "without a credential" in output


def test_schema_describes_every_shipped_configuration() -> None:
    whole = json.loads(run("schema")[1])
    single = json.loads(run("schema", "--policy")[1])
    for file in [*(ROOT / "config").glob("*.yaml"), ROOT / "examples" / "proxy.yaml"]:
        text = file.read_text()
        jsonschema.validate(yaml.safe_load(text), whole)
        assert (file.parent / text.splitlines()[0].partition("$schema=")[2]).exists(), file
    for file in [
        *(ROOT / "config" / "policies").glob("*.yaml"),
        *(ROOT / "policies" / "compaction_policies" / "presets").glob("*.yaml"),
    ]:
        text = file.read_text()
        jsonschema.validate(yaml.safe_load(text), single)
        modeline = text.splitlines()[0].partition("$schema=")[2]
        assert (file.parent / modeline).exists(), file


def test_init_writes_a_starter_that_checks_and_never_overwrites(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    assert run("init", str(file))[0] == 0
    assert run("check", str(file))[0] == 0
    before = file.read_text()
    code, output = run("init", str(file))
    assert (code, file.read_text()) == (1, before)
    assert "exists" in output


def test_serve_refuses_a_bad_configuration_and_an_open_relay(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text("providers: {openai: {baseUrl: https://x.org/v1, apiKey: k}}\n")
    code, output = run("serve", "--config", str(file), "--host", "0.0.0.0")
    assert code == 2
    assert "clientKeys" in output
    assert run("serve", "--config", str(tmp_path / "none.yaml"))[0] == 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1) as reply:
            return bool(json.loads(reply.read())["status"] == "ok")
    except OSError:
        return False


def serve(tmp_path: Path, file: Path, port: int, *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "compaction_proxy", "serve", "--config", str(file), "--port", str(port), *more]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_serve_says_what_it_does_reloads_on_hangup_and_ends_its_store(short_path: Path) -> None:
    file, port = short_path / "proxy.yaml", free_port()
    file.write_text("policies: {a: {epoch: 1}}\n")
    process = serve(short_path, file, port)
    try:
        wait_until(lambda: answers(port), 20)
        file.write_text("policies: {a: {epoch: nonsense}}\n")
        process.send_signal(signal.SIGHUP)
    finally:
        wait_until(lambda: answers(port), 5)
        process.terminate()
        _, said = process.communicate(timeout=20)
    assert f"base_url   http://127.0.0.1:{port}/v1" in said
    assert "embedded://" in said
    assert "store.keepOriginals: false" in said
    assert "policies.a.epoch" in said
    assert process.returncode in (0, -signal.SIGTERM)
    wait_until(lambda: not running(str(short_path)))


def test_workers_share_one_embedded_store(short_path: Path) -> None:
    file, port = short_path / "proxy.yaml", free_port()
    file.write_text("{}\n")
    process = serve(short_path, file, port, "--workers", "2")
    try:
        wait_until(lambda: answers(port), 30)
        servers = [line for line in running(short_path.name) if "unixsocket" in line]
        assert len(servers) == 1
    finally:
        process.terminate()
        process.communicate(timeout=30)
