"""Porter's stemmer (M. F. Porter, 1980, "An algorithm for suffix stripping").

With the two later amendments of his own program and of Lucene: "-bli" to "-ble" and "-logi" to "-log".
"""

from __future__ import annotations

import itertools

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
