"""What belongs to the project as a whole: layout, locks, examples, the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from compaction_proxy.config import load_settings

ROOT = Path(__file__).resolve().parent.parent


# Modules that tests reach through a public door and not by name: the module or its package -> where that door is tried.
THROUGH_THE_DOOR = {
    "compaction_policies.protect": "core/test_plan.py",
    "compaction_policies.strategies": "core/test_plan.py",
    "compaction_proxy.cli": "proxy/test_cli.py",
    "compaction_proxy.config": "proxy/test_config.py",
    "compaction_proxy.demo": "test_repository.py",
    "compaction_proxy.pipeline": "proxy/test_e2e_compaction.py",
    "compaction_proxy.routes": "proxy/test_e2e_http.py",
    "compaction_proxy.services": "proxy/test_e2e_compaction.py",
    "compaction_proxy.settle": "proxy/test_telemetry.py",
    "compaction_proxy.store": "proxy/test_store.py",
    "compaction_proxy.telemetry": "proxy/test_telemetry.py",
}


def tracked() -> list[Path]:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split()]


def pinned(name: str) -> dict[str, str]:
    """Package -> version of one lock, each with its markers ignored."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9_.-]+)(?:\[[^\]]*\])?==([^ ;\\]+)", text, re.MULTILINE))


def test_the_layout_is_the_agreed_one() -> None:
    for name in (
        "pyproject.toml",
        "proxy",
        "policies",
        "config",
        "tests",
        "Dockerfile",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "Makefile",
    ):
        assert (ROOT / name).exists(), name


def test_no_file_names_a_registry_host_or_a_path_of_some_machine() -> None:
    unwanted = re.compile(
        r"files\.pythonhosted|registry\.npmjs|deb\.debian\.org|pypi\.org/simple|/root/\.|(?<![\w.])/work/"
    )
    for file in tracked():
        if (
            file.suffix in (".py", ".md", ".toml", ".txt", ".yaml", ".sh", "")
            and file.is_file()
            and file != Path(__file__)
        ):
            assert not unwanted.search(file.read_text(encoding="utf-8", errors="replace")), file


@pytest.mark.parametrize("name", ["dev.txt", "runtime.txt"])
def test_the_locks_hold_hashes_and_no_compromised_release(name: str) -> None:
    versions = pinned(name)
    assert versions["litellm"] not in ("1.82.7", "1.82.8")
    assert tuple(map(int, versions["litellm"].split(".")[:2])) >= (1, 84)
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    assert text.count("--hash=sha256:") >= len(versions)


def test_the_locks_fit_what_the_project_declares() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    runtime, groups = declared["project"]["dependencies"], declared["dependency-groups"]
    dev = [entry for entry in groups["dev"] if isinstance(entry, str)]
    for lock, wanted in (("runtime.txt", runtime), ("build.txt", groups["build"]), ("dev.txt", [*runtime, *dev])):
        versions = pinned(lock)
        for requirement in map(Requirement, wanted):
            version = versions.get(canonicalize_name(requirement.name))
            assert version is not None, f"{lock} lacks {requirement}: run make lock"
            assert requirement.specifier.contains(version, prereleases=True), f"{lock}: {requirement} is {version}"


def test_what_the_image_runs_is_what_the_tests_ran() -> None:
    assert pinned("runtime.txt").items() <= pinned("dev.txt").items()
    assert pinned("build.txt").items() <= pinned("dev.txt").items()


def test_the_targets_that_the_documents_name_exist() -> None:
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert made >= {"demo", "serve", "test", "check", "bench", "test-container"}
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / ".ci" / "run"]:
        named = re.findall(r"(?:`|exec |^ *)make ([a-z-]+)", document.read_text(encoding="utf-8"), re.MULTILINE)
        assert made >= set(named), document.name


def test_every_module_is_tested_by_name_or_through_a_door() -> None:
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py"))
    for root in (ROOT / "proxy", ROOT / "policies"):
        for module in root.rglob("*.py"):
            if module.stem in ("__init__", "__main__"):
                continue
            dotted = ".".join(module.relative_to(root).with_suffix("").parts)
            parent, _, leaf = dotted.rpartition(".")
            by_name = f"from {dotted} import" in tests or re.search(
                rf"from {re.escape(parent)} import [^\n]*\b{leaf}\b", tests
            )
            assert by_name or dotted in THROUGH_THE_DOOR or parent in THROUGH_THE_DOOR, f"no test reaches {dotted}"
    for name, where in THROUGH_THE_DOOR.items():
        path = name.replace(".", "/")
        assert [
            r for r in (ROOT / "proxy", ROOT / "policies") if (r / path).is_dir() or (r / f"{path}.py").is_file()
        ], name
        assert (ROOT / "tests" / where).is_file(), where


def test_the_compose_example_is_well_formed_and_its_configuration_loads() -> None:
    compose = yaml.safe_load((ROOT / "examples" / "compose.yaml").read_text(encoding="utf-8"))
    assert set(compose["services"]) == {"proxy", "redis", "jaeger"}
    for name, service in compose["services"].items():
        assert set(service) <= {
            "build",
            "image",
            "command",
            "ports",
            "volumes",
            "environment",
            "depends_on",
            "healthcheck",
        }, name
        assert ("image" in service) != ("build" in service)
        assert ":latest" not in service.get("image", ":")
        for mount in service.get("volumes", ()):
            assert (ROOT / "examples" / mount.split(":")[0]).exists()
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "published to this machine alone"
    settings = load_settings(ROOT / "examples" / "proxy.yaml", {})
    assert settings.store.public_url == "redis://redis:6379/0"


def test_the_wheel_works_from_an_empty_folder(tmp_path: Path) -> None:
    built = tmp_path / "dist"
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(built)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    wheel = next(built.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {name.split("/")[0].split("-")[0] for name in names} == {"compaction_proxy", "compaction_policies"}
    assert "compaction_policies/presets/balanced.yaml" in names
    assert not [name for name in names if "test" in name.lower()]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = "import compaction_proxy; print(compaction_proxy.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert str(tmp_path / "site") in found.stdout
    checked = subprocess.run(
        [sys.executable, "-m", "compaction_proxy", "check", *map(str, (ROOT / "config").glob("*.yaml"))],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_the_demonstration_runs_without_key_or_network(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "OTEL"))}
    done = subprocess.run(
        [sys.executable, "-m", "compaction_proxy", "demo"],
        cwd=tmp_path,
        env={**environment, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "compacted; pre-step" in done.stdout
    assert "saved" in done.stdout
    assert "as the model got it" in done.stdout
    assert "record of the earlier conversation" in done.stdout
