"""Text to search terms as Lucene's English analysis does it.

Words by Unicode rules, possessives cut, lower case, stop words out, Porter stems. The tokens, more than the
formula, decide what a search finds.
"""

from __future__ import annotations

import re

from shoal.envs.webshop.porter import stem

STOP_WORDS = frozenset(
    """a an and are as at be but by for if in into is it no not of on or such that the their then there
    these they this to was will with""".split()
)
"""The 33 words that Lucene's English analysis leaves out."""

# Letters may be joined by one of : . ' and digits by one of . , ; ' (Unicode Annex 29, rules 6 to 12).
_PLAIN = re.compile(
    r"\w+(?:(?:(?<=[a-zA-Z])[:.'](?=[a-zA-Z])|(?<=[0-9])[.,;'](?=[0-9]))\w+)*",
    re.ASCII,
)
# Beyond ASCII: marks belong to the letter before them, Chinese and Hiragana signs are words of their own.
_SIGNS = r"\u3040-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_RUN = rf"[^\W{_SIGNS}](?:[^\W{_SIGNS}]|[\u0300-\u036f\u200d\ufe0f])*"
_ANY = re.compile(
    rf"{_RUN}(?:(?:(?<=[^\W\d_])[:.'’·](?=[^\W\d_])|(?<=\d)[.,;'’](?=\d)){_RUN})*"
    rf"|[{_SIGNS}]|[\u2600-\u27bf\U0001f300-\U0001faff]"
)
_POSSESSIVE = ("'s", "’s", "＇s", "'S", "’S", "＇S")
MAX_TOKEN = 255


class Analyzer(dict[str, str]):
    """Word to term, remembered; the empty string for a word that is not searched."""

    def __missing__(self, word: str) -> str:
        plain = word[:-2] if word.endswith(_POSSESSIVE) else word
        plain = plain.lower()
        term = "" if plain in STOP_WORDS or not plain.strip("_") else stem(plain)
        if len(self) < 1_000_000:
            self[word] = term
        return term


_analyzer = Analyzer()


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
    analyzed = [_analyzer[word] for word in words(text)]
    return [term for term in analyzed if term]
