"""The words of configuration problems: one reader, a golden file per subject (YAML ``----------`` every problem)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from compaction_proxy.cli import main
from compaction_proxy.config import ConfigError, Reload, Settings, Watcher, find_config, load_settings, with_address
from support.valkey import wait_until

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "config"
ENVIRONMENT = {"NUMBER": "80x", "SECRET": "s3cret", "WORD": "yes"}


def problems(folder: Path, content: bytes) -> list[str]:
    file = folder / "proxy.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_settings(file, ENVIRONMENT)
    return str(caught.value).replace(str(file), "proxy.yaml").splitlines()


@pytest.mark.parametrize("name", sorted(file.stem for file in GOLDEN.glob("*.txt")))
def test_every_problem_in_its_exact_words(tmp_path: Path, name: str) -> None:
    content, _, expected = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").partition("----------\n")
    found = problems(tmp_path, content.encode())
    assert found == expected.splitlines()
    assert "s3cret" not in "\n".join(found)


LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
FORMS = {
    "empty": (b"", "proxy.yaml:1:1: the file is empty"),
    "only a comment": (b"# nothing\n", "proxy.yaml:1:1: the file is empty"),
    "a list": (b"- a\n", "proxy.yaml:1:1: expected a mapping of keys at the top"),
    "two documents": (
        b"server: {}\n---\nserver: {}\n",
        "proxy.yaml:2:1: not YAML: expected a single document in the stream, but found another document",
    ),
    "a tab": (b"server:\n\tport: 1\n", "proxy.yaml:2:1: not YAML: found character '\\t' that cannot start any token"),
    "latin-1": (b"a: 1\nb: \xe9\n", "proxy.yaml:2:4: not UTF-8 text"),
    "a control character": (b'server: {host: "a\x01"}\n', "proxy.yaml:1:18: not YAML: character U+0001 is not allowed"),
    "a tag": (
        b"server: !!python/object:os.system {}\n",
        "proxy.yaml:1:9: server: the tag !!python/object:os.system is not supported",
    ),
    "a key twice": (
        b"server:\n  port: 1\n  port: 2\n",
        "proxy.yaml:3:3: server.port: duplicate key; first given on line 2",
    ),
    "a number as a key": (b"policies: {1: {}}\n", "proxy.yaml:1:12: policies: a key must be a string, got 1"),
    "a variable in braces": (
        b"server: {port: ${PORT}}\n",
        "proxy.yaml:1:17: not YAML: expected ',' or '}', but got '{'; inside { } and [ ] write \"${VAR}\" in quotes",
    ),
    "aliases without end": (
        b"server: &a [*a]\n",
        "proxy.yaml:1:9: server[0]: an alias refers to a value that contains it",
    ),
    "a billion laughs": (LAUGHS.encode(), "more than 50000 values; aliases count once per use"),
    "deep": (b"a: " + b"[" * 60 + b"]" * 60, "nested too deeply"),
    "very deep": (b"a: " + b"[" * 9000 + b"]" * 9000, "proxy.yaml: nested too deeply"),
    "large": (b"#" * (1 << 20) + b"\n", "proxy.yaml: larger than 1048576 bytes"),
    "many digits": (b"server: {port: " + b"1" * 5000 + b"}\n", "server.port: expected a whole number, got '1111"),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_configuration_at_all(tmp_path: Path, form: str) -> None:
    content, expected = FORMS[form]
    assert expected in problems(tmp_path, content)[0]


def test_aliases_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(
        "\ufeffpolicies:\n  a: {thresholds: &t {thresholdTokens: 5000}}\n  b: {thresholds: *t}\n", encoding="utf-8"
    )
    policies = load_settings(file, {}).policies
    assert policies["a"].thresholds == policies["b"].thresholds
    assert policies["a"].revision == policies["b"].revision


def test_an_empty_variable_is_no_key_and_a_number_in_one_stays_text(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(
        "server:\n  port: ${PORT:-8788}\n"
        "providers: {p: {baseUrl: https://x.org/v1/, apiKey: '${KEY:-}', headers: {x-n: '${N}'}}}\n"
        "telemetry: {captureContent: '${CAPTURE}'}\n"
        "policies: {a: {mode: '${MODE}', protectedMaxTokens: '${BOUND}'}}\n",
        encoding="utf-8",
    )
    settings = load_settings(file, {"N": "12", "CAPTURE": "true", "MODE": "false", "BOUND": "null", "KEY": ""})
    provider = settings.providers["p"]
    assert (settings.server.port, provider.api_key, provider.headers["x-n"]) == (8788, None, "12")
    assert provider.base_url == "https://x.org/v1"
    assert settings.telemetry.capture_content is True
    assert (settings.policies["a"].mode, settings.policies["a"].protected_max_tokens) == ("off", None)
    assert type(provider.headers["x-n"]).__name__ == "Secret"


def test_odd_but_usable_values_are_warned_about(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(
        "server: {clientKeys: [{name: a, key: k}]}\n"
        "models: [{match: '*', provider: openai}, {match: b, provider: openai}]\n"
        "policyFiles: ['none/*.yaml']\n"
        "policies: {a: {thresholds: {thresholdTokens: 1999, targetRatio: 0.71}}}\n",
        encoding="utf-8",
    )
    found = [warning.replace(str(file), "proxy.yaml") for warning in load_settings(file, {}).warnings]
    assert found == [
        "proxy.yaml: models[0]: matches every model; the entries after it are never used",
        "proxy.yaml: providers.openai: clientKeys are set and this provider has no apiKey: it is called without a credential",
        "proxy.yaml:3:15: policyFiles[0]: no file matches 'none/*.yaml'",
        "proxy.yaml:4:46: policies.a.thresholds.thresholdTokens: 1999 tokens is less than a useful conversation (2000 and more is sensible)",
        "proxy.yaml:4:65: policies.a.thresholds.targetRatio: above 0.7 compactions come so often that each loses the provider's cache",
    ]


def test_a_small_threshold_is_fine_with_what_a_preset_keeps(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text("policies: {a: {thresholds: {thresholdTokens: 12000}}}\n", encoding="utf-8")
    assert load_settings(file, {}).warnings == ()


def test_presets_build_on_each_other_and_a_shipped_name_may_be_extended(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(
        "policies:\n"
        "  c: {preset: b, thresholds: {targetRatio: 0.4}}\n"
        "  b: {preset: coding-agent, excludeTools: [x], thresholds: {reserveTokens: 1}}\n"
        "  coding-agent: {preset: coding-agent, summaryRole: assistant, timing: {gateWaitMs: 7}}\n"
        "  n: {preset: c, thresholds: never}\n"
        "  m: {preset: n, thresholds: {thresholdTokens: 5000}}\n",
        encoding="utf-8",
    )
    policies = load_settings(file, {}).policies
    made = policies["c"]
    assert (made.summary_role, made.exclude_tools, made.timing.gate_wait_ms) == ("assistant", ("x",), 7)
    assert (made.thresholds.target_ratio, made.thresholds.reserve_tokens) == (0.4, 1)
    assert policies["n"].thresholds.never
    assert policies["m"].thresholds.threshold_tokens == 5000
    assert not policies["m"].thresholds.never


def test_policy_files_by_pattern_skip_hidden_folders_and_are_checked_under_their_own_names(tmp_path: Path) -> None:
    (tmp_path / "p" / "..data").mkdir(parents=True)
    (tmp_path / "p" / "..data" / "x.yaml").write_text("epoch: wrong\n")
    (tmp_path / "p" / "a.yaml").write_text("preset: b\n")
    (tmp_path / "p" / "b.yaml").write_text("epochs: 1\nepoch: '${NOPE}'\n")
    (tmp_path / "p" / "not a name.yaml").write_text("epoch: 1\n")
    file = tmp_path / "proxy.yaml"
    file.write_text("policyFiles: ['p/**/*.yaml', p/a.yaml]\nmodels: [{match: '*', provider: openai, policy: a}]\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(file, {})
    assert str(caught.value).replace(f"{tmp_path}/", "").splitlines() == [
        "p/b.yaml:1:1: epochs: unknown key; did you mean 'epoch'?",
        "p/b.yaml:2:8: epoch: the environment variable NOPE is not set; set it, or write ${NOPE:-default}",
        "p/not a name.yaml: the file names the policy, and 'not a name' is not a name",
    ]


def test_where_the_configuration_is_looked_for(tmp_path: Path) -> None:
    env = {"COMPACTION_PROXY_CONFIG": "named.yaml"}
    assert find_config("given.yaml", env, tmp_path) == Path("given.yaml")
    assert find_config(None, env, tmp_path) == Path("named.yaml")
    assert find_config(None, {"COMPACTION_PROXY_CONFIG": ""}, tmp_path) is None
    (tmp_path / "proxy.yaml").touch()
    assert find_config(None, {}, tmp_path) == tmp_path / "proxy.yaml"


def test_effective_policies_can_be_read_back_as_what_they_show(tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(
        "preset: support-chat\nexcludeTools: ['null', '12', 'true', 'a b', \"a'\\\"\\n#\", 'todo_*']\npins: {constraints: ['x: y']}\n"
    )
    shown = CliRunner().invoke(main, ["check", "--effective", str(file)]).output
    values = yaml.safe_load(shown)["odd"]
    assert values["excludeTools"] == ["null", "12", "true", "a b", "a'\"\n#", "todo_*"]
    again = tmp_path / "again.yaml"
    again.write_text("\n".join(line[2:] for line in shown.splitlines()[1:]), encoding="utf-8")
    policies = load_both(tmp_path, file, again)
    assert policies["odd"] == policies["again"]


def load_both(folder: Path, *files: Path) -> dict[str, str]:
    config = folder / "both.yaml"
    config.write_text(f"policyFiles: [{', '.join(file.name for file in files)}]\n")
    return {name: policy.revision for name, policy in load_settings(config, {}).policies.items()}


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Path, Settings, list[Reload], Watcher]]:
    """A configuration with a policy file, loaded; its watcher, not started."""
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.yaml").write_text("epoch: 1\n")
    file = tmp_path / "proxy.yaml"
    file.write_text("policyFiles: ['p/*.yaml']\n")
    settings, seen = with_address(load_settings(file, {}), "127.0.0.2", 0), list[Reload]()
    watcher = Watcher(file, {}, settings, seen.append, interval_seconds=0.01)
    yield tmp_path, settings, seen, watcher
    watcher.stop()


def test_the_watchers_thread_sees_changed_new_and_removed_policy_files(
    watched: tuple[Path, Settings, list[Reload], Watcher],
) -> None:
    folder, _, seen, watcher = watched
    watcher.start()
    (folder / "p" / "a.yaml").write_text("epoch: 2\n")
    wait_until(lambda: watcher.settings.policies["a"].epoch == 2, 5)
    (folder / "new").write_text("epoch: 3\n")
    (folder / "new").rename(folder / "p" / "b.yaml")
    wait_until(lambda: "b" in watcher.settings.policies, 5)
    (folder / "p" / "b.yaml").unlink()
    wait_until(lambda: "b" not in watcher.settings.policies, 5)
    watcher.stop()
    assert not [result.problems for result in seen if result.problems]
    assert "config-watcher" not in [thread.name for thread in threading.enumerate()]


def test_a_change_before_the_watcher_began_is_seen(watched: tuple[Path, Settings, list[Reload], Watcher]) -> None:
    folder, settings, seen, _ = watched
    (folder / "p" / "a.yaml").write_text("epoch: 5\n")
    late = Watcher(folder / "proxy.yaml", {}, settings, seen.append)
    assert late.poll() is not None
    assert late.settings.policies["a"].epoch == 5
    assert late.poll() is None


def test_a_broken_file_is_reported_once_and_its_repair_is_seen(
    watched: tuple[Path, Settings, list[Reload], Watcher],
) -> None:
    folder, _, seen, watcher = watched
    good = (folder / "proxy.yaml").read_text()
    (folder / "proxy.yaml").write_text("policyFiles: [\n")
    assert watcher.poll() is not None
    assert watcher.poll() is None
    (folder / "proxy.yaml").unlink()
    assert watcher.poll() is not None
    assert "cannot be read: No such file or directory" in str(seen[-1].problems[0])
    (folder / "proxy.yaml").write_text(good)
    assert watcher.poll() is not None
    assert [bool(result.problems) for result in seen] == [True, True, False]


def test_an_address_of_the_command_line_is_no_change_of_the_server(
    watched: tuple[Path, Settings, list[Reload], Watcher],
) -> None:
    folder, _, _, watcher = watched
    (folder / "p" / "a.yaml").write_text("epoch: 2\n")
    assert watcher.reload().restart == ()
    (folder / "proxy.yaml").write_text("store: {ttlSeconds: 5}\ntelemetry: {serviceName: x}\n")
    result = watcher.reload()
    assert result.restart == ("store", "telemetry")
    assert result.settings.server.host == "127.0.0.2"
    assert "changes in store, telemetry need a restart; until then the former ones stay in force" in result.lines()


def test_a_reload_never_lends_a_key_to_strangers(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text("server: {host: 0.0.0.0}\n")
    watcher = Watcher(file, {}, load_settings(file, {}), lambda _: None)
    file.write_text(
        "server: {host: 0.0.0.0, clientKeys: [{name: a, key: k}]}\n"
        "providers: {openai: {baseUrl: https://x.org/v1, apiKey: k}}\n"
    )
    load_settings(file, {})
    result = watcher.reload()
    assert "needs a restart" in str(result.problems[0])
    assert result.settings.providers["openai"].api_key is None
