"""Counting: exact, offline, never raising, remembered within a bound."""

from __future__ import annotations

import asyncio
import functools
import gzip
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tiktoken
import tiktoken.load
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from compaction_proxy import tokens
from compaction_proxy.catalogue import Catalogue, ModelSize, catalogue_file, parse
from compaction_proxy.tokens import (
    CL100K,
    O200K,
    Counter,
    Counters,
    Vocabulary,
    estimate,
    exactly,
    load,
    pieces,
    rank_files,
    vocabulary_of,
)


@functools.cache
def encoding(vocabulary: Vocabulary) -> tiktoken.Encoding:
    found = load(vocabulary, None)
    assert found is not None
    return found


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
    for vocabulary in (O200K, CL100K):
        assert exactly(encoding(vocabulary))(text) >= (1 if text else 0)


@pytest.mark.parametrize(("vocabulary", "name"), [(O200K, "o200k_base"), (CL100K, "cl100k_base")])
def test_the_constants_are_tiktokens_own(vocabulary: Vocabulary, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def nothing(url: str, expected_hash: str | None = None) -> dict[bytes, int]:
        asked.append((url, expected_hash))
        return {}

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", nothing)
    constants = openai_public.ENCODING_CONSTRUCTORS[name]()
    assert asked == [(vocabulary.url, vocabulary.sha256)]
    assert constants["pat_str"] == vocabulary.pattern
    assert constants["special_tokens"] == dict(vocabulary.special_tokens)


ALPHABET = [
    "a",
    "é",
    "文",
    "9",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "'",
    "'s",
    "/",
    "//",
    "_",
    "{",
    '":"',
    "\u0301",
    "\u00a0",
    "😀",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(ALPHABET), min_size=30, max_size=200), st.integers(min_value=12, max_value=60))
def test_a_text_in_pieces_counts_as_the_whole(parts: list[str], size: int) -> None:
    text = "".join(parts)
    cut = list(pieces(text, size))
    assert "".join(cut) == text
    assert all(0 < len(piece) <= size for piece in cut)
    hard = [left for left, right in zip(cut, cut[1:], strict=False) if not _soft(left[-1], right[0])]
    assert all(len(piece) == size for piece in hard), "only where no boundary is near"
    for vocabulary in (O200K, CL100K):
        whole = len(encoding(vocabulary).encode_ordinary(text))
        counted = sum(len(encoding(vocabulary).encode_ordinary(piece)) for piece in cut)
        assert abs(counted - whole) <= 4 * len(hard)


def _soft(before: str, after: str) -> bool:
    return before.isalnum() and after.isascii() and not after.isalnum() and after != "'"


def test_real_text_in_pieces_counts_as_the_whole() -> None:
    text = Path(tokens.__file__).read_text(encoding="utf-8") * 3
    assert len(list(pieces(text))) > 1
    for vocabulary in (O200K, CL100K):
        assert exactly(encoding(vocabulary))(text) == len(encoding(vocabulary).encode_ordinary(text))


def test_a_panic_of_the_tokenizer_becomes_an_estimate() -> None:
    spaces = " " * 1_000_000
    assert exactly(encoding(O200K), size=2_000_000)(spaces) == estimate(spaces)


def test_every_source_loads(tmp_path: Path) -> None:
    sources = list(rank_files(O200K, tmp_path))
    assert [path.parent for path in sources][:1] == [tmp_path]
    assert len(sources) == 3
    assert all(path.is_file() for path in sources[1:]), "a package moved its vocabulary"
    (tmp_path / CL100K.cache_name).write_bytes(gzip.decompress(list(rank_files(CL100K, None))[0].read_bytes()))
    assert load(CL100K, tmp_path) is not None


async def test_without_a_vocabulary_counts_are_estimates_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tokens, "rank_files", lambda vocabulary, cache_dir: iter([Path("/nowhere/at/all")]))
    counters = Counters()
    counter = await counters.get("gpt-5")
    assert not counter.exact
    assert counter.count("上下文压缩测试") == 7
    assert "estimates" in caplog.text
    counters.close()


async def test_a_benchmark_counts_by_characters() -> None:
    counters = Counters(by_characters=True)
    assert (await counters.get("gpt-5")).count("a" * 401) == 101
    counters.close()


def test_threads_share_the_memo() -> None:
    counter = Counter(len, exact=True, memo_bytes=5_000)
    wrong: list[str] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(3_000):
            text = "x" * chance.randrange(1, 60)
            if counter.count(text) != len(text):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 0 < counter.held_bytes <= 5_000


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
    assert catalogue.context_window("gpt-4o-2031-01-31") == 128_000, "a dated model"
    assert catalogue.context_window("router/openai/gpt-4o") == 128_000
    assert catalogue.context_window("acme/unknown-v9") is None
    assert catalogue.context_window("sample_spec") is None
    assert "litellm" not in sys.modules


async def test_a_missing_catalogue_is_a_warning_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    catalogue = Catalogue(tmp_path / "gone.json")
    await catalogue.load()
    assert catalogue.context_window("gpt-4o") is None
    assert len(caplog.records) == 1


def test_the_older_key_of_the_catalogue_is_an_input_limit_only_where_no_output_limit_is_given() -> None:
    known = parse(
        b'{"a": {"max_tokens": 8192}, "b": {"max_tokens": 4096, "max_output_tokens": 4096}, '
        b'"c": {"max_input_tokens": "words"}, "d": {"max_input_tokens": 1e6, "mode": "chat"}}'
    )
    assert known == {"a": ModelSize(8192, None), "b": ModelSize(None, 4096), "d": ModelSize(1_000_000, None)}
