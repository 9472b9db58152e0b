"""BM25 over an inverted index in numpy, with Lucene's formula, parameters and one-byte document lengths.

Robertson and Zaragoza (2009), "The Probabilistic Relevance Framework: BM25 and Beyond", eq. 3.15, with the
idf and the length rounding of Lucene, and k1 and b as WebShop's search engine sets them.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.files import write_bytes
from shoal.envs.webshop.tokens import _analyzer, terms, words

logger = logging.getLogger(__name__)

K1 = 0.9
B = 0.4
MAX_QUERY_WORDS = 1024
"""Different terms of a query that are looked up, as in Lucene."""
KEPT_INDEXES = 8
"""Indexes in the cache folder; the oldest make room."""
_FORMAT = "shoal-bm25-1"
_ROWS = 32  # of the table that scores are laid out in to find the best of them


def rounded_length(length: int) -> int:
    """A document length after Lucene's trip through one byte: exact up to 40, then three significant bits."""
    free = 24  # values below which the byte is exact: 255 - (int4 code of 2**31 - 1)
    if length < free:
        return length
    value = length - free
    if value < 8:
        return length
    shift = value.bit_length() - 4
    return free + ((value >> shift) << shift)


class Index:
    """Documents by term, with the weight of each term in each document worked out beforehand.

    Args:
        vocabulary: the terms, each once.
        starts: `[terms + 1]` where the postings of each term begin.
        documents: `[postings]` document numbers, ascending within a term.
        weights: `[postings]` what a term adds to a document's score.
        ties: `[documents]` the order among equal scores.
    """

    def __init__(
        self,
        vocabulary: Sequence[str],
        starts: NDArray[np.int64],
        documents: NDArray[np.signedinteger[Any]],
        weights: NDArray[np.float32],
        ties: NDArray[np.int32],
    ) -> None:
        self.vocabulary = list(vocabulary)
        self.starts, self.weights, self.ties = starts, weights, ties
        self.documents = documents.astype(np.intp, copy=False)  # numpy converts narrower indices at each use
        self._number = {term: number for number, term in enumerate(self.vocabulary)}

    def __len__(self) -> int:
        return len(self.ties)

    def search(self, query: str, k: int = 50) -> NDArray[np.int64]:
        """The numbers of at most `k` documents with a term of the query, best first."""
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        counts = Counter(terms(query[:65_536]))
        known = [
            (self._number[term], count)
            for term, count in list(counts.items())[:MAX_QUERY_WORDS]
            if term in self._number
        ]
        scores = np.zeros(-(-len(self) // _ROWS) * _ROWS, dtype=np.float32)  # padded to whole rows
        for number, count in known:
            postings = slice(self.starts[number], self.starts[number + 1])
            # A document occurs once per term, so that fancy indexing loses nothing.
            weights = self.weights[postings]
            scores[self.documents[postings]] += weights if count == 1 else np.float32(count) * weights
        hits = (
            np.flatnonzero(scores >= bound)
            if (bound := _lower_bound(scores, k)) > 0
            else np.flatnonzero(scores)
        )
        order = np.lexsort((self.ties[hits], -scores[hits]))
        return hits[order[:k]]


def _lower_bound(scores: NDArray[np.float32], k: int) -> float:
    """A score that at least `k` documents reach, 0 when none is known.

    The k-th best of the best of each column: far fewer numbers to order than there are documents.
    """
    columns = scores.reshape(_ROWS, -1).max(axis=0) if len(scores) >= _ROWS * k else scores
    return float(np.partition(columns, len(columns) - k)[len(columns) - k]) if len(columns) >= k else 0.0


def build_index(texts: Sequence[str], ids: Sequence[str]) -> Index:
    """An index of documents; equal scores are ordered by id."""
    number: dict[str, int] = {}
    postings: list[NDArray[np.int64]] = []
    lengths = np.zeros(len(texts), dtype=np.int64)
    n = len(texts)
    chunk: list[int] = []
    owners: list[int] = []
    of_word: dict[str, int] = {}
    for document, text in enumerate(texts):
        for word in words(text):
            term_number = of_word.get(word)
            if term_number is None:
                term = _analyzer[word]
                term_number = number.setdefault(term, len(number)) if term else -1
                of_word[word] = term_number
            if term_number >= 0:
                chunk.append(term_number)
        found = len(chunk) - (owners[-1] if owners else 0)
        lengths[document] = found
        owners.append(len(chunk))
        if len(chunk) > 1_000_000 or document == n - 1:
            first = document + 1 - len(owners)
            repeats = np.diff(np.array([0, *owners]))
            keys = np.array(chunk, dtype=np.int64) * n + np.repeat(np.arange(first, document + 1), repeats)
            postings.append(keys)
            chunk, owners = [], []
    keys, frequencies = np.unique(
        np.concatenate(postings) if postings else np.empty(0, np.int64), return_counts=True
    )
    term_of, document_of = np.divmod(keys, max(n, 1))
    starts = np.searchsorted(term_of, np.arange(len(number) + 1))
    weights = _weights(np.diff(starts), frequencies, lengths, document_of)
    ties = np.empty(n, dtype=np.int32)
    ties[np.argsort(np.array(ids, dtype=object), kind="stable")] = np.arange(n, dtype=np.int32)
    return Index(list(number), starts.astype(np.int64), document_of.astype(np.int32), weights, ties)


def _weights(
    containing: NDArray[np.int64],
    frequencies: NDArray[np.int64],
    lengths: NDArray[np.int64],
    document_of: NDArray[np.int64],
) -> NDArray[np.float32]:
    """`idf * tf / (tf + k1 * (1 - b + b * length / mean length))` for each posting."""
    filled = max(1, int(np.count_nonzero(lengths)))
    mean = max(1.0, float(lengths.sum()) / filled)
    idf = np.log(1 + (filled - containing + 0.5) / (containing + 0.5))
    rounded = np.array([rounded_length(length) for length in lengths.tolist()], dtype=np.float64)
    norms = K1 * (1 - B + B * rounded / mean)
    saturated = frequencies / (frequencies + norms[document_of])
    return (np.repeat(idf, containing) * saturated).astype(np.float32)


def cache_folder() -> Path:
    """Where indexes are kept between processes: `$XDG_CACHE_HOME/shoal` or `~/.cache/shoal`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shoal"


def cached_index(texts: Sequence[str], ids: Sequence[str]) -> Index:
    """`build_index`, kept on disk under a hash of its input; a broken or unwritable cache only costs time."""
    digest = hashlib.sha256(_FORMAT.encode())
    for identity, text in zip(ids, texts, strict=True):
        for part in (identity.encode("utf-8", "surrogatepass"), text.encode("utf-8", "surrogatepass")):
            digest.update(len(part).to_bytes(8, "little") + part)
    path = cache_folder() / f"webshop-{digest.hexdigest()[:32]}.npz"
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
            # Lines cannot occur in a term.
            index = Index(str(data["vocabulary"]).split("\n"), *(data[name] for name in _ARRAYS))
        if len(index) == len(ids):
            return index
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("rebuilding the search index: %s cannot be read (%s)", path, error)
    index = build_index(texts, ids)
    buffer = io.BytesIO()
    arrays = {name: getattr(index, name) for name in _ARRAYS}
    arrays["documents"] = index.documents.astype(np.int32)
    np.savez(buffer, allow_pickle=False, vocabulary=np.array("\n".join(index.vocabulary)), **arrays)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, buffer.getvalue())
        kept = sorted(path.parent.glob("webshop-*.npz"), key=lambda file: file.stat().st_mtime_ns)
        for old in kept[:-KEPT_INDEXES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("the search index is not kept for next time: %s", error)
    return index


_ARRAYS = ("starts", "documents", "weights", "ties")
