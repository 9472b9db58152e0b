"""The nouns of a product title, by rule, close to what a statistical tagger says of such titles.

Titles are mostly proper nouns, so that the rule names what is not one: function words, numbers, signs, and
verbs and adjectives known by their form. `spacy_nouns` asks spaCy instead, as WebShop itself does.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from shoal.core.errors import missing_extra

NounFunction = Callable[[str], tuple[str, ...]]
"""From a title to its nouns in lower case, in order, repetitions kept."""

_FUNCTION_WORDS = frozenset(
    """a an the this that these those and or but nor so if as than because while when where which who
    whose what for with of in to on by from at into onto over under up out off about above below behind
    between through during without within against upon after before until per via along around across
    among toward towards near like i you he she it we they me him her us them my your his its our their
    own mine yours is are was were be been being am do does did done has have had can could will would
    shall should may might must not no n't never only also just still even ever very more most much many
    any some each every all both either neither other another such few less least fully easily simply
    nearly once again too well really perfectly one two three four five six seven eight nine ten eleven
    twelve twenty thirty forty fifty sixty hundred thousand 's ’s etc how why there here then now""".split()
)
_VERBS = frozenset(
    """make makes made get gets give gives keep keeps help helps fits used includes include including
    included apply applies contains contain comes come reduce reduces improves improve promote promotes
    restores removes designed based inspired imported damaged powered shielded smoked repairing listed
    handcrafted crafted infused approved tested recommended required discontinued upgraded replaced
    covered wrapped hold holds hang hide enjoy boost need needs try want wants see look looks let lets
    stay prevent prevents protect protects remove""".split()
)
_ADJECTIVES = frozenset(
    """full large original young effective comfortable virtual true stable italian oriental nordic
    japanese african islamic french persian hawaiian jamaican intimate personal private delicate narrow
    typical lucky tough resealable removable retractable inflatable shatterproof better best newest
    longer same available""".split()
)
_LOWER_ENDINGS = ("able", "ible", "ful", "ous", "ive", "less", "ish", "ical", "ed", "ly")
_LOWER_ADJECTIVES = frozenset(
    """small medium short long thin thick light dark black white red blue green brown pink grey gray
    purple yellow natural organic big little fine hot cold dry wet warm cool clean clear fresh pure rich
    safe sweet deep flat free round square solid heavy double single dual easy daily dual double sexy
    casual elegant mini portable wireless digital electric universal professional vintage modern classic
    wide suitable different new perfect great good strong soft high low friendly compatible tall empty
    hard smooth bright""".split()
)

_UNITS = "km|cm|mm|dm|nm|µm|m|ha|yd|in|ft|kg|mg|µg|g|t|lb|oz|mph|mb|MB|kb|KB|gb|GB|tb|TB|T|G|M|K"
_BEFORE = re.compile(r"[\[\]()<>{}\"'“”‘’«»$£€¥#*&+~.,;:!?…/\\–—-]")
_AFTER = re.compile(r"(?:['’][sS]|\.\.+|[\[\]()<>{}\"'“”‘’«»%*~,;:!?…/\\–—+-]|(?<![A-Z])\.)\Z")
_MEASURE = re.compile(rf"([0-9])({_UNITS})\Z")
_INSIDE = re.compile(
    r"(?<=[^\W_])([-–—]+)(?=[^\W\d_])|(?<=[^\W_])[:<>=/](?=[^\W\d_])|(?<=[^\W\d_])[,](?=[^\W\d_])"
)
_NUMBER = re.compile(r"[+-]?[0-9][0-9.,/]*(?:st|nd|rd|th)?")
_ALPHA = re.compile(r"[^\W\d_]")


def title_words(title: str) -> list[str]:
    """The words of a title: signs at the edges are cut away, compounds are split at hyphens and slashes."""
    words: list[str] = []
    for chunk in title[:2000].split():
        words += _pieces(chunk)
    return words


@functools.lru_cache(maxsize=65_536)
def _pieces(chunk: str) -> tuple[str, ...]:
    while chunk and _BEFORE.match(chunk):
        chunk = chunk[1:]
    tail: list[str] = []
    while chunk and (match := _AFTER.search(chunk)):
        if match.group().lower() in ("'s", "’s"):
            tail.append(match.group())
        chunk = chunk[: match.start()]
    if match := _MEASURE.search(chunk):
        chunk, tail = chunk[: match.start(2)], [match.group(2), *tail]
    return tuple(word for word in [*_INSIDE.sub(" ", chunk).split(), *tail] if word)


def is_noun(word: str) -> bool:
    """Whether a word of a title counts as a noun."""
    folded = word.lower()
    if word in ("|", "US"):  # a lone bar passes for a name with taggers
        return True
    if folded in _FUNCTION_WORDS or folded in _VERBS or folded in _ADJECTIVES:
        return False
    if not _ALPHA.search(word) or _NUMBER.fullmatch(folded):
        return False
    if word == folded and (folded in _LOWER_ADJECTIVES or folded.endswith(_LOWER_ENDINGS)):
        return False
    return folded != "x"


def title_nouns(title: str) -> tuple[str, ...]:
    """The nouns of a title, in lower case.

    >>> title_nouns("Walnut Console Table with 2 Drawers, for the Hallway")
    ('walnut', 'console', 'table', 'drawers', 'hallway')
    """
    return tuple(word.lower() for word in title_words(title) if is_noun(word))


def spacy_nouns(model: str = "en_core_web_sm") -> NounFunction:
    """A noun function that asks an installed spaCy model; the published reward uses `en_core_web_lg`."""
    try:
        import spacy

        tagger = spacy.load(model)
    except (ImportError, OSError) as error:
        raise missing_extra(f"nouns by spaCy with the model {model!r}", "spacy") from error

    @functools.lru_cache(maxsize=65_536)
    def nouns(title: str) -> tuple[str, ...]:
        return tuple(token.text.lower() for token in tagger(title) if token.pos_ in ("NOUN", "PROPN"))

    return nouns
