"""The documentation says what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from compaction_policies.outcomes import APPLIED, FAILED, NOT_DUE, OUTCOMES
from compaction_proxy import __version__
from compaction_proxy.cli import HELP, main
from compaction_proxy.config import load_settings
from compaction_proxy.telemetry import INSTRUMENTS, compaction_attributes

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}


def test_the_files_made_from_the_schema_are_in_step() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "config_docs.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_annotated_reference_does_the_same_as_no_configuration() -> None:
    reference, built_in = load_settings(ROOT / "config" / "proxy.yaml", {}), load_settings(None, {})
    assert reference.server == built_in.server
    assert (reference.store, reference.telemetry) == (built_in.store, built_in.telemetry)
    assert dict(reference.providers) == dict(built_in.providers)
    ours, theirs = reference.policies["default"], built_in.policies["balanced"]
    assert (ours.thresholds, ours.strategies, ours.timing) == (theirs.thresholds, theirs.strategies, theirs.timing)


def test_the_readme_shows_the_smallest_configuration_as_it_is() -> None:
    assert (ROOT / "config" / "minimal.yaml").read_text(encoding="utf-8").strip() in README
    assert 100 <= len(README.splitlines()) <= 150


def test_every_yaml_example_in_the_documentation_loads(tmp_path: Path) -> None:
    shown = re.findall(r"```yaml\n(.*?)```", README + "".join(DOCS.values()), re.DOTALL)
    assert len(shown) >= 3
    for number, text in enumerate(shown):
        file = tmp_path / f"example{number}.yaml"
        file.write_text(text, encoding="utf-8")
        variables = {name: "x" for name in re.findall(r"\$\{(\w+)", text)}
        load_settings(file, variables)


def test_every_link_between_documents_leads_somewhere() -> None:
    for base, text in [(ROOT, README), *((ROOT / "docs", text) for text in DOCS.values())]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (base / link).exists(), link


def test_every_outcome_and_reason_is_explained() -> None:
    for word in (*OUTCOMES, *APPLIED, *NOT_DUE, *FAILED):
        assert f"`{word}`" in DOCS["how-it-works.md"], word


def test_every_command_is_in_the_help_and_the_readme_names_the_main_ones() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    for name, text in HELP.items():
        assert re.search(rf"^  {name} +{re.escape(text.split()[0])}", shown, re.MULTILINE), name
        result = CliRunner().invoke(main, [name, "--help"])
        assert result.exit_code == 0, name
    for name in ("serve", "init", "check", "schema"):
        assert f"compaction-proxy {name}" in README
    assert CliRunner().invoke(main, ["--version"]).output.strip().endswith(__version__)


@pytest.mark.parametrize("name", sorted(INSTRUMENTS))
def test_every_metric_is_documented(name: str) -> None:
    assert f"`{name}`" in DOCS["tracing.md"]


def test_every_attribute_of_the_compaction_span_is_documented() -> None:
    source = Path(compaction_attributes.__code__.co_filename).read_text(encoding="utf-8")
    for name in re.findall(r'"(compaction\.[a-z_]+)"', source):
        assert f"`{name}`" in DOCS["tracing.md"], name
