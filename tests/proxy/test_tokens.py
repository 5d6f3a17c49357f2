"""Counting: exact, offline, never raising, remembered within a bound."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken.load

from compaction_proxy.catalogue import Catalogue, catalogue_file
from compaction_proxy.tokens import CL100K, O200K, Counter, Counters, estimate, exactly, load, rank_files, vocabulary_of


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        message = "the tokenizer asked the network"
        raise AssertionError(message)

    monkeypatch.setattr(tiktoken.load, "read_file", refuse)


@pytest.mark.parametrize(
    ("model", "text", "tokens"),
    [
        ("gpt-5", "hello world", 2),
        ("gpt-4o", "上下文压缩测试", 5),
        ("gpt-4", "hello world", 2),
        ("gpt-4", "tiktoken is great!", 6),
    ],
)
async def test_counts_are_those_of_tiktoken(model: str, text: str, tokens: int) -> None:
    counters = Counters()
    counter = await counters.get(model)
    assert counter.exact
    assert counter.count(text) == tokens
    counters.close()


def test_the_vocabulary_follows_the_model() -> None:
    assert vocabulary_of("gpt-5") == O200K
    assert vocabulary_of("some-local-model") == O200K
    assert vocabulary_of("gpt-4-0613") == CL100K
    assert vocabulary_of("gpt-4o-mini") == O200K
    assert vocabulary_of("gpt-3.5-turbo") == CL100K


@pytest.mark.parametrize(
    "text",
    ["<|endoftext|><|im_start|>", " " * 1_000_000, "a" * 300_000, "\ud83c lone \udfff", "\x00" * 1000, ""],
    ids=["special", "spaces", "run", "surrogates", "nul", "empty"],
)
def test_no_text_raises(text: str) -> None:
    encoding = load(O200K, None)
    assert encoding is not None
    assert exactly(encoding)(text) >= (1 if text else 0)


def test_a_file_with_another_hash_is_not_used(tmp_path: Path) -> None:
    (tmp_path / O200K.cache_name).write_bytes(b"junk")
    assert next(iter(rank_files(O200K, tmp_path))) == tmp_path / O200K.cache_name
    assert load(O200K, tmp_path) is not None, "the next source is"


def test_it_loads_in_a_process_without_a_network() -> None:
    code = "from compaction_proxy.tokens import *; e = load(O200K, None); print(exactly(e)('hello world'))"
    command = [sys.executable, "-c", code]
    if (
        shutil.which("unshare")
        and subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode == 0
    ):
        command = ["unshare", "-rn", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2"


def test_the_memo_is_bounded_and_never_counts_twice() -> None:
    calls: list[str] = []

    def measure(text: str) -> int:
        calls.append(text)
        return len(text)

    counter = Counter(measure, exact=True, memo_bytes=20_000)
    assert [counter.count("abc"), counter.count("abc")] == [3, 3]
    assert calls == ["abc"]
    assert counter.knows("abc")
    for number in range(500):
        counter.count(f"text {number} " * 10)
    assert counter.held_bytes <= 20_000
    assert not counter.knows("abc")


def test_an_estimate_knows_scripts() -> None:
    assert estimate("上下文压缩测试" * 100) > 400
    assert estimate("the quick brown fox " * 100) == pytest.approx(500, rel=0.3)


async def test_vocabularies_load_once_for_many_requests() -> None:
    counters = Counters()
    found = await asyncio.gather(*(counters.get("gpt-5") for _ in range(8)))
    assert len({id(counter) for counter in found}) == 1
    counters.close()


async def test_windows_come_from_the_catalogue_without_importing_litellm() -> None:
    assert catalogue_file() is not None, "the file moved inside litellm"
    catalogue = Catalogue()
    assert catalogue.context_window("gpt-4o") is None
    await catalogue.load()
    assert catalogue.context_window("gpt-4o") == 128_000
    assert catalogue.context_window("openai/gpt-4o") == 128_000
    assert catalogue.max_output("gpt-4o") == 16_384
    assert catalogue.context_window("acme/unknown-v9") is None
    assert "litellm" not in sys.modules


async def test_a_missing_catalogue_is_a_warning_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    catalogue = Catalogue(tmp_path / "gone.json")
    await catalogue.load()
    assert catalogue.context_window("gpt-4o") is None
    assert len(caplog.records) == 1
