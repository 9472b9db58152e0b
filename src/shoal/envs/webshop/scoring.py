"""WebShop's reward (Yao et al., 2022, arXiv:2207.01206, sec. 2.3 and appendix A), by its parts.

    reward = r_type * (attribute hits + option hits + [price <= limit]) / (attributes + options + 1)

The parts follow the program that the authors published where it says more than the paper.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from shoal.core.errors import missing_extra
from shoal.envs.webshop.catalogue import Goal, Product

# --- how alike two short texts are
_LATIN_1: dict[int, str | None] = {code: None for code in range(128, 256)}
_LATIN_1[0x130] = "i"  # its lower case would be two characters
_NOT_WORD = re.compile(r"[\W_]+")


@functools.lru_cache(maxsize=65_536)
def _tokens(text: str) -> frozenset[str]:
    return frozenset(_NOT_WORD.sub(" ", text.translate(_LATIN_1).lower()).split())


def _common(left: str, right: str) -> int:
    """Length of the longest common subsequence, by bit-parallel rows (Hyyrö, 2004)."""
    where: dict[str, int] = {}
    for position, character in enumerate(left):
        where[character] = where.get(character, 0) | 1 << position
    full = (1 << len(left)) - 1
    row = full
    for character in right:
        matches = row & where.get(character, 0)
        row = (row + matches) | (row - matches)
    return len(left) - (row & full).bit_count()


def _ratio(distance: int, length: int) -> float:
    return 100.0 * (1 - distance / length) if length else 100.0


@functools.lru_cache(maxsize=65_536)
def token_set_ratio(left: str, right: str) -> int:
    """100 when all words of one are in the other; else by the letters that the differing words share.

    >>> token_set_ratio("easy to clean", "Clean, easy"), token_set_ratio("light blue", "dark blue")
    (100, 62)
    """
    a, b = _tokens(left), _tokens(right)
    if not a or not b:
        return 0
    shared, only_a, only_b = a & b, " ".join(sorted(a - b)), " ".join(sorted(b - a))
    if shared and not (only_a and only_b):
        return 100
    joined = len(" ".join(sorted(shared)))
    gap = 1 if joined else 0
    length_a, length_b = joined + gap + len(only_a), joined + gap + len(only_b)
    distance = len(only_a) + len(only_b) - 2 * _common(only_a, only_b)
    best = _ratio(distance, length_a + length_b)
    if joined:
        best = max(
            best, _ratio(gap + len(only_a), joined + length_a), _ratio(gap + len(only_b), joined + length_b)
        )
    return round(best)


# --- nouns of titles
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


# --- the reward
ALIKE = 85
"""Token-set ratios above this are a match."""

# The colour words that option values are reduced to, in the order in which they are looked for.
COLORS = tuple(
    """alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
    burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac
    copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite
    grape graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon leopard light
    lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom mustard natural navy
    nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell
    silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
    wheat white wine yellow""".split()
)


class Reward(TypedDict):
    """The reward and its parts, each in [0, 1]."""

    reward: float
    r_type: float
    r_att: float
    r_option: float | None  # None when the goal names no option
    r_price: float


def reward(
    product: Product,
    goal: Goal,
    price: float,
    options: Mapping[str, str],
    *,
    noun_fn: NounFunction = title_nouns,
) -> Reward:
    """What buying `product` with `options` at `price` is worth for `goal`.

    Args:
        product: what is bought.
        goal: what was wanted.
        price: what the product costs.
        options: the chosen value by option name.
        noun_fn: finds the nouns of titles.
    """
    r_type = type_reward(product, goal, noun_fn)
    attributes = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
    chosen = option_hits(options.values(), goal.options)
    affordable = price <= goal.price_upper
    total = len(goal.attributes) + len(goal.options) + 1
    return Reward(
        reward=r_type * (attributes + chosen + affordable) / total,
        r_type=r_type,
        r_att=attributes / len(goal.attributes) if goal.attributes else 1.0,
        r_option=chosen / len(goal.options) if goal.options else None,
        r_price=float(affordable),
    )


def type_reward(product: Product, goal: Goal, noun_fn: NounFunction = title_nouns) -> float:
    """Whether it is the kind of thing wanted: 1, 0.5, 0.1 or 0, by query, category and title nouns."""
    wanted, bought = noun_fn(goal.name), noun_fn(product.title)
    title = len(set(wanted) & set(bought)) / len(wanted) if wanted else 0.2
    if title == 0:
        return 0.0
    if title < 0.1:
        return 0.1
    alike = (
        product.query == goal.query
        or len(_categories(product.product_category) & _categories(goal.product_category)) >= 2
        or title > 0.2
    )
    return 1.0 if alike else 0.5


def _categories(path: str) -> set[str]:
    return {part.strip() for part in path.split("›")}


def _has_attribute(product: Product, wanted: str) -> bool:
    """Whether a product attribute is like the wanted one, or the wanted one stands in the product's texts."""
    return (
        any(token_set_ratio(attribute, wanted) > ALIKE for attribute in product.attributes)
        or wanted in product.title.lower()
        or wanted in " ".join(product.bullets).lower()
        or wanted in product.description.lower()
    )


def option_hits(chosen: Any, wanted: Mapping[str, str] | Sequence[str]) -> int:
    """How many wanted options are like one of the chosen values, after both are reduced to their colours."""
    given = [first_color(value) for value in chosen]
    names = (
        [_named(*item) for item in wanted.items()]
        if isinstance(wanted, Mapping)
        else map(first_color, wanted)
    )
    return sum(any(token_set_ratio(value, name) > ALIKE for value in given) for name in names)


def first_color(value: str) -> str:
    """The first colour word that occurs in an option value, or the value itself."""
    return next((color for color in COLORS if color in value), value)


def _named(name: str, value: str) -> str:
    """A wanted option with its name, as the published program compares it: a pair written out as text.

    Only a name or value that is a colour word as a whole is reduced to it there.
    """
    return next((color for color in COLORS if color in (name, value)), str((name, value)))
