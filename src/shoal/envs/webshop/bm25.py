"""Search as WebShop's engine does it: Lucene's English analysis, and BM25 over an inverted index in numpy.

Text to terms: words by Unicode rules, possessives cut, lower case, stop words out, Porter stems; the tokens, more than
the formula, decide what a search finds. Scores: Robertson and Zaragoza (2009), "The Probabilistic Relevance
Framework: BM25 and Beyond", eq. 3.15, with the idf and the one-byte document lengths of Lucene.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import logging
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import reading
from shoal.core.files import cache_folder, write_bytes

logger = logging.getLogger(__name__)


# --- terms
STOP_WORDS = frozenset(
    """a an and are as at be but by for if in into is it no not of on or such that the their then there
    these they this to was will with""".split()
)
"""The 33 words that Lucene's English analysis leaves out."""

# Letters may be joined by one of : . ' and digits by one of . , ; ' (Unicode Annex 29, rules 6 to 12).
_PLAIN = re.compile(r"\w+(?:(?:(?<=[a-zA-Z])[:.'](?=[a-zA-Z])|(?<=[0-9])[.,;'](?=[0-9]))\w+)*", re.ASCII)
# Beyond ASCII: marks belong to the letter before them, Chinese and Hiragana signs are words of their own.
_SIGNS = r"\u3040-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_RUN = rf"[^\W{_SIGNS}](?:[^\W{_SIGNS}]|[\u0300-\u036f\u200d\ufe0f])*"
_ANY = re.compile(
    rf"{_RUN}(?:(?:(?<=[^\W\d_])[:.'’·](?=[^\W\d_])|(?<=\d)[.,;'’](?=\d)){_RUN})*"
    rf"|[{_SIGNS}]|[\u2600-\u27bf\U0001f300-\U0001faff]"
)
_POSSESSIVE = ("'s", "’s", "＇s", "'S", "’S", "＇S")
MAX_TOKEN = 255


@functools.lru_cache(maxsize=1_000_000)
def stemmed(word: str) -> str:
    """The term of a word, remembered; the empty string for a word that is not searched."""
    plain = (word[:-2] if word.endswith(_POSSESSIVE) else word).lower()
    return "" if plain in STOP_WORDS or not plain.strip("_") else stem(plain)


def words(text: str) -> list[str]:
    """The words of a text before analysis; longer than 255 characters are cut into pieces, as Lucene does."""
    found = (_PLAIN if text.isascii() else _ANY).findall(text)
    if any(len(word) > MAX_TOKEN for word in found):
        found = [word[at : at + MAX_TOKEN] for word in found for at in range(0, len(word), MAX_TOKEN)]
    return found


def terms(text: str) -> list[str]:
    """The search terms of a text, in order, repetitions kept.

    >>> terms("The women's 3.5-inch heels, resealable bags")
    ['women', '3.5', 'inch', 'heel', 'reseal', 'bag']
    """
    return [term for term in map(stemmed, words(text)) if term]


# --- Porter's stemmer (M. F. Porter, 1980, "An algorithm for suffix stripping"), with the two later amendments of
# his own program and of Lucene: "-bli" to "-ble" and "-logi" to "-log"
_STEP_2 = {
    "ational": "ate", "tional": "tion", "enci": "ence", "anci": "ance", "izer": "ize", "bli": "ble",
    "alli": "al", "entli": "ent", "eli": "e", "ousli": "ous", "ization": "ize", "ation": "ate",
    "ator": "ate", "alism": "al", "iveness": "ive", "fulness": "ful", "ousness": "ous", "aliti": "al",
    "iviti": "ive", "biliti": "ble", "logi": "log",
}  # fmt: skip
_STEP_3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
_STEP_4 = (
    "ement", "ance", "ence", "able", "ible", "ment", "ant", "ent", "ism", "ate", "iti", "ous", "ive", "ize",
    "ion", "al", "er", "ic", "ou",
)  # fmt: skip


def _consonants(word: str) -> list[bool]:
    """For each letter whether it is a consonant; y is one at the start and after a vowel."""
    result: list[bool] = []
    for letter in word:
        if letter == "y":
            result.append(not result or not result[-1])
        else:
            result.append(letter not in "aeiou")
    return result


def _measure(stem: str) -> int:
    """How often a vowel is followed by a consonant: m in [C](VC)^m[V]."""
    kinds = _consonants(stem)
    return sum(not before and after for before, after in itertools.pairwise(kinds))


def _has_vowel(stem: str) -> bool:
    return not all(_consonants(stem))


def _ends_double(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _consonants(word)[-1]


def _ends_cvc(word: str) -> bool:
    """Consonant, vowel, consonant at the end, the last not w, x or y."""
    return len(word) > 2 and _consonants(word)[-3:] == [True, False, True] and word[-1] not in "wxy"


def stem(word: str) -> str:
    """The stem of a lower-case word; words of one or two letters stay as they are.

    >>> [stem(word) for word in ("tables", "hopping", "relational", "rechargeable", "sky")]
    ['tabl', 'hop', 'relat', 'recharg', 'sky']
    """
    if len(word) <= 2:
        return word
    word = _derivations(_inflections(word))
    if word.endswith("e"):
        measure = _measure(word[:-1])
        if measure > 1 or (measure == 1 and not _ends_cvc(word[:-1])):
            word = word[:-1]
    if word.endswith("ll") and _measure(word[:-1]) > 1:
        word = word[:-1]
    return word


def _inflections(word: str) -> str:
    """Step 1: plurals, -ed, -ing, and y after a vowel."""
    if word.endswith("sses") or word.endswith("ies"):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    if word.endswith("eed"):
        if _measure(word[:-3]) > 0:
            word = word[:-1]
    else:
        cut = 2 if word.endswith("ed") else 3 if word.endswith("ing") else 0
        if cut and _has_vowel(word[:-cut]):
            word = word[:-cut]
            if word.endswith(("at", "bl", "iz")):
                word += "e"
            elif _ends_double(word) and word[-1] not in "lsz":
                word = word[:-1]
            elif _measure(word) == 1 and _ends_cvc(word):
                word += "e"
    if word.endswith("y") and _has_vowel(word[:-1]):
        word = word[:-1] + "i"
    return word


def _derivations(word: str) -> str:
    """Steps 2 to 4: the longest fitting suffix of each step."""
    for table in (_STEP_2, _STEP_3):
        suffix = max((s for s in table if word.endswith(s)), key=len, default="")
        if suffix and _measure(word[: -len(suffix)]) > 0:
            word = word[: -len(suffix)] + table[suffix]
    suffix = max((s for s in _STEP_4 if word.endswith(s)), key=len, default="")
    rest = word[: -len(suffix)] if suffix else word
    if suffix and _measure(rest) > 1 and (suffix != "ion" or rest.endswith(("s", "t"))):
        word = rest
    return word


# --- the index
K1 = 0.9
B = 0.4
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
        counts = Counter(term for term in terms(query) if term in self._number)
        scores = np.zeros(-(-len(self) // _ROWS) * _ROWS, dtype=np.float32)  # padded to whole rows
        for term, count in counts.items():
            number = self._number[term]
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
    lengths = np.zeros(n := len(texts), dtype=np.int64)
    occurring = array("q")  # the number of each term of each text, one after the other
    for document, text in enumerate(texts):
        found = terms(text)
        lengths[document] = len(found)
        occurring.extend(number.setdefault(term, len(number)) for term in found)
    keys = np.array(occurring, np.int64) * n + np.repeat(np.arange(n), lengths)
    keys, frequencies = np.unique(keys, return_counts=True)
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


def cached_index(texts: Sequence[str], ids: Sequence[str]) -> Index:
    """`build_index`, kept on disk under a hash of its input.

    Where the cache folder cannot be written it is built each time, which is logged.

    Raises:
        DataError: the file of the index was damaged.
    """
    digest = hashlib.sha256(_FORMAT.encode())
    for identity, text in zip(ids, texts, strict=True):
        for part in (identity.encode("utf-8", "surrogatepass"), text.encode("utf-8", "surrogatepass")):
            digest.update(len(part).to_bytes(8, "little") + part)
    path = cache_folder() / f"webshop-{digest.hexdigest()[:32]}.npz"
    if path.is_file():
        with (
            reading(path, "is a damaged search index", ": remove it"),
            path.open("rb") as file,
            np.load(file, allow_pickle=False) as data,
        ):
            # Lines cannot occur in a term.
            return Index(str(data["vocabulary"]).split("\n"), *(data[name] for name in _ARRAYS))
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
