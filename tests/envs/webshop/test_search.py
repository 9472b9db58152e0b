"""Tokens, stems, weights and ranks, each against an oracle written from its definition."""

import itertools
import logging
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.envs.webshop.shelf import texts

from shoal.core.errors import DataError
from shoal.envs.webshop.bm25 import (
    K1,
    KEPT_INDEXES,
    MAX_TOKEN,
    B,
    build_index,
    cache_folder,
    cached_index,
    rounded_length,
    stem,
    terms,
    words,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The women's 3.5-inch Heels", ["women", "3.5", "inch", "heel"]),
        ("1,000 U.S.A. x-large", ["1,000", "u.s.a", "x", "larg"]),
        ("don't stop can’t", ["don't", "stop", "can’t"]),
        ("snake_case __ a_b", ["snake_cas", "a_b"]),
        ("12v/5a 50% off!", ["12v", "5a", "50", "off"]),
        ("naïve CAFÉ", ["naïv", "café"]),
        ("cafe\u0301s at u.s.a, 3.5’s", ["cafe\u0301", "u.s.a", "3.5", "s"]),
        ("日本のtea カメラ 한국어", ["日", "本", "の", "tea", "カメラ", "한국어"]),
        ("heart ❤ red", ["heart", "❤", "red"]),
        ("1,a 1, 2 a.1 3;4", ["1", "1", "2", "1", "3;4"]),
        ("and or not", []),
        ("", []),
    ],
)
def test_words_become_the_terms_of_lucenes_english_analysis(text, expected):
    assert [term for term in terms(text) if term not in ("a",)] == expected


@given(st.text(alphabet="ab1_.,:;'- \t/", max_size=40))
def test_plain_and_other_texts_have_the_same_words(text):
    """The short way for ASCII and the long one for all texts agree: a Greek letter at the end takes the long one."""
    assert [*words(text), "λ"] == words(text + " λ")


def test_longer_words_than_lucene_takes_are_cut():
    assert [len(word) for word in words("x" * 600)] == [MAX_TOKEN, MAX_TOKEN, 90]


def test_stems_by_hand():
    shown = {"boxed": "box", "snowing": "snow", "played": "plai", "filing": "file", "hopping": "hop", "falling": "fall",
             "agreed": "agre", "skies": "ski", "controll": "control", "analogy": "analog"}  # fmt: skip
    assert {word: stem(word) for word in shown} == shown


SUFFIXES = """s ies sses ed eed ing ational tional enci anci izer bli alli entli eli ousli ization ation ator
    alism iveness fulness ousness aliti iviti biliti logi icate ative alize iciti ical ful ness ement ance ence able
    ible ment ant ent ism ate iti ous ive ize ion al er ic ou e y ll""".split()


@given(
    st.text(alphabet="abcdeilnorsty", min_size=1, max_size=7),
    st.lists(st.sampled_from(SUFFIXES), min_size=1, max_size=3),
)
def test_stems_of_suffixed_words_are_those_of_porters_own_program(start, suffixes):
    porter = pytest.importorskip("nltk.stem.porter").PorterStemmer
    word = start + "".join(suffixes)
    assert stem(word) == porter(mode=porter.MARTIN_EXTENSIONS).stem(word)


def test_document_lengths_make_lucenes_trip_through_one_byte():
    """The trip: below 24 as it is; else 24 more than the rest with its four leading bits."""

    def four_bits(value):
        if value < 8:
            return value
        exponent = int(math.log2(value)) - 3
        return (value // 2**exponent) * 2**exponent

    for length in range(5000):
        assert rounded_length(length) == (length if length < 24 else 24 + four_bits(length - 24))
    assert [rounded_length(n) for n in (39, 40, 41, 42, 100, 1000)] == [39, 40, 40, 42, 96, 984]


def slow_scores(analyzed, query):
    """Scores by the formula, one document and one query term at a time."""
    containing = {term: sum(term in tokens for tokens in analyzed) for term in terms(query)}
    filled = [tokens for tokens in analyzed if tokens]
    mean = sum(map(len, filled)) / max(1, len(filled))
    scores = []
    for tokens in analyzed:
        score = 0.0
        for term in terms(query):
            frequency = tokens.count(term)
            idf = math.log(1 + (len(filled) - containing[term] + 0.5) / (containing[term] + 0.5))
            norm = K1 * (1 - B + B * rounded_length(len(tokens)) / max(1.0, mean))
            score += idf * frequency / (frequency + norm) if frequency else 0.0
        scores.append(score)
    return scores


@pytest.mark.parametrize("seed", range(2))
def test_ranks_are_those_of_the_formula_ties_by_id(seed):
    documents = texts(70, seed)
    ids = [f"B{(i * 37) % 101:03}" for i in range(len(documents))]
    index, analyzed = build_index(documents, ids), [*map(terms, documents)]
    for query in [*texts(25, seed + 100), "walnut table", "table table table oak", "nowhere", ""]:
        scores = slow_scores(analyzed, query)
        found = index.search(query, 20).tolist()
        matching = [i for i, score in enumerate(scores) if score > 0]
        assert len(found) == min(20, len(matching))
        assert np.allclose(
            [scores[i] for i in found],
            sorted((scores[i] for i in matching), reverse=True)[: len(found)],
            rtol=1e-5,
        )
        for before, after in itertools.pairwise(found):
            assert math.isclose(scores[before], scores[after], rel_tol=1e-5) or scores[before] > scores[after]
            if documents[before] == documents[after]:
                assert ids[before] < ids[after]


def test_equal_documents_are_ordered_by_id_also_at_the_cut():
    index = build_index(["oak table"] * 30, [f"{(7 * i) % 30:02}" for i in range(30)])
    assert index.search("table", 5).tolist() == sorted(range(30), key=lambda i: (7 * i) % 30)[:5]


def test_a_catalogue_without_words_finds_nothing():
    assert build_index(["", "of the"], ["a", "b"]).search("the table").tolist() == []
    assert build_index([], []).search("table").tolist() == []


def test_hostile_queries_are_bounded():
    index = build_index(texts(500), [str(i) for i in range(500)])
    for query in (
        "table " * 50_000,
        "'" * 1_000_000,
        "a." * 500_000,
        "\U0001f600" * 50_000,
    ):
        assert len(index.search(query)) <= 50


def test_an_index_is_kept_in_the_cache_folder_and_a_damaged_one_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    documents, ids = texts(40), [str(i) for i in range(40)]
    plain = build_index(documents, ids)
    made = cached_index(documents, ids)
    (path,) = cache_folder().glob("*.npz")
    stamp = path.stat().st_mtime_ns
    kept = cached_index(documents, ids)
    assert path.stat().st_mtime_ns == stamp
    for query in texts(20, 9):
        assert plain.search(query).tolist() == made.search(query).tolist() == kept.search(query).tolist()
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"not a zip"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="is a damaged search index .*: remove it"):
            cached_index(documents, ids)
    path.unlink()
    cached_index([*documents[:-1], "another text"], ids)
    assert len(list(cache_folder().glob("*.npz"))) == 1
    for number in range(20):
        cached_index([f"oak {number}"], ["a"])
    assert len(list(cache_folder().glob("*.npz"))) == KEPT_INDEXES


def test_a_cache_that_cannot_be_written_only_warns(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert len(cached_index(["oak"], ["a"]).search("oak")) == 1
    assert "not kept" in caplog.text
