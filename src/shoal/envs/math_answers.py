r"""Whether two final answers are the same: exact, by small grammars, without evaluating anything.

Known are integers, decimals, thousands (`1,000`), fractions (`3/4`, `\frac{3}{4}`, `1 1/2`), percent, powers
of ten, scale words, units, lists, tuples and sets. What is none of these is compared as tidied text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from shoal.envs.actions import last_tag

MAX_RESPONSE = 65_536
"""Characters of a response looked at, from the end."""
MAX_ANSWER = 256
"""Characters of a final answer; longer ones are no answer."""
MAX_PARTS = 32

_MARK = re.compile(
    r"\\(?:boxed|fbox)\s{0,3}(?P<brace>\{)|(?<!\w)(?:answer|Answer|ANSWER)(?:\s{1,3}(?i:is)\b|\s{0,3}:)|####"
)


def final_answer(response: str) -> str | None:
    r"""The final answer that a response states, or None.

    It stands in the last `\boxed{…}`, or after the last "answer is", "answer:" or "####", whichever is
    later; a response without any of these is the answer itself.

    >>> final_answer("3 + 4 is 7, so the answer is: $7$."), final_answer(r"so \boxed{\frac{1}{2}}")
    ('$7$.', '\\frac{1}{2}')
    """
    text = response[-MAX_RESPONSE:]
    if "</" in text:
        text = last_tag(text, ("answer", "action")) or text
    marks = list(_MARK.finditer(text))
    if not marks:
        answer = text.strip()
    elif (last := marks[-1])["brace"]:
        inside = _braced(text, last.end())
        if inside is None:
            return None
        answer = inside.strip()
    else:
        lines = text[last.end() : last.end() + 4 * MAX_ANSWER].lstrip(" \t:").split("\n", 1)
        answer = lines[0].strip()
    return answer if 0 < len(answer) <= MAX_ANSWER else None


def _braced(text: str, start: int) -> str | None:
    """The text from `start` to the brace that closes it."""
    depth = 1
    for at in range(start, min(len(text), start + MAX_ANSWER + 1)):
        if text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[start:at]
    return None


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value and what it counts, "" when that is not said."""

    value: Fraction
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Several:
    """A list of answers; `ordered` for tuples and intervals, whose brackets count."""

    parts: tuple[Answer, ...]
    brackets: str
    ordered: bool
    names: tuple[str, ...] = ()  # of each part what is before its "=", "" for none


Answer = Number | Several | str


def is_correct(response: str, truth: str) -> bool:
    r"""Whether the final answer of a response equals the true one, exactly; never slow, never evaluated.

    Both may be bare answers or whole texts with `\boxed{…}`, "The answer is: …" or "#### …".

    >>> is_correct(r"So we get \boxed{\frac{1}{2}}", "0.5"), is_correct("50%", "50")
    (True, False)
    >>> is_correct("The answer is: 1,000 dollars", "1000"), is_correct("0.333", "1/3")
    (True, False)
    """
    given, wanted = final_answer(response), final_answer(truth)
    return given is not None and wanted is not None and _equal(read_answer(given), read_answer(wanted))


def _equal(left: Answer, right: Answer) -> bool:
    if isinstance(left, Number) and isinstance(right, Number):
        return left.value == right.value and (left.unit == right.unit or not (left.unit and right.unit))
    if isinstance(left, Several) and isinstance(right, Several):
        if len(left.parts) != len(right.parts) or left.ordered != right.ordered:
            return False
        if left.ordered:
            pairs = zip(left.parts, right.parts, strict=True)
            return left.brackets == right.brackets and all(_equal(a, b) for a, b in pairs)
        named = sorted(left.names) == sorted(right.names)  # else one side left names out, or chose its own
        rest = list(zip(right.names, right.parts, strict=True))
        for name, part in zip(left.names, left.parts, strict=True):
            alike = (_equal(part, other) and (name == its or not named) for its, other in rest)
            match = next((i for i, fits in enumerate(alike) if fits), None)
            if match is None:
                return False
            del rest[match]
        return True
    return isinstance(left, str) and left == right and left != ""


def is_numerical(response: str) -> bool:
    r"""Whether the final answer of a response is made of numbers or of letters that stand for them.

    >>> is_numerical("5 or 6"), is_numerical(r"\frac{a}{b}"), is_numerical("hello")
    (True, True, False)
    """
    answer = final_answer(response)
    if answer is None:
        return False
    plain = _plain(answer)
    words = _LETTERS.findall(_COMMAND.sub(" ", plain))
    return any(map(str.isdecimal, plain)) or (
        all(len(word) == 1 for word in words) and bool(words or _COMMAND.search(plain) or "∞" in plain)
    )


def words_of(response: str) -> frozenset[str]:
    """The parts of a final answer that are no numbers, tidied as answers are compared."""
    answer = final_answer(response)
    return frozenset() if answer is None else frozenset(_words(read_answer(answer)))


def _words(answer: Answer) -> Iterator[str]:
    if isinstance(answer, Several):
        for part in answer.parts:
            yield from _words(part)
    elif isinstance(answer, str):
        yield answer


def read_answer(text: str) -> Answer:
    """The meaning of a final answer: a number, several answers, or tidied text."""
    return _read(_plain(text), depth=0)


def _read(text: str, depth: int) -> Answer:
    text = _named(text)[1]
    number = read_number(text)
    if number is not None:
        return number
    brackets = text[:1] + text[-1:]
    enclosed = brackets in ("()", "[]", "{}", "(]", "[)") and len(text) > 2
    parts = _split(text[1:-1] if enclosed else text)
    if depth < 4 and 1 < len(parts) <= MAX_PARTS and all(parts):
        ordered = enclosed and brackets != "{}"
        meant, names = (_read(part, depth + 1) for part in parts), (_named(part)[0] for part in parts)
        return Several(tuple(meant), brackets if ordered else "", ordered, tuple(names))
    if enclosed and len(parts) == 1 and depth < 4 and brackets in ("()", "{}"):
        inner = read_number(parts[0])
        if inner is not None:
            return inner
    return re.sub(r"\s+", "", text).casefold().rstrip(".")


def _named(text: str) -> tuple[str, str]:
    """The name in "x = 5", "" for none, and the rest."""
    text = text.strip().strip(";").strip()
    name = _NAME.match(text)
    if name is None or "=" in text[name.end() :]:
        return "", text
    return re.sub(r"[\s={}]", "", name[0]), text[name.end() :].strip()


def _split(text: str) -> list[str]:
    """Parts between commas that are outside all brackets."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()]


_LETTERS = re.compile(r"[^\W\d_]+")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_NAME = re.compile(r"[A-Za-z](?:_\{?[A-Za-z0-9]\}?|\([a-z]\))?\s*=\s*")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,\\!|\\,|\{,\})(?=[0-9]{3})")
_SPACING = re.compile(
    r"\\[,!;: ]|~|\\q?quad(?![A-Za-z])|\\(?:left|right)(?![A-Za-z])|\\displaystyle(?![A-Za-z])"
)
_WORDS = re.compile(r"\\(?:text|mathrm|mathbf|textbf|textrm|mbox|operatorname)\s?\{([^{}]*)\}")
_FRACTION = re.compile(
    r"\\[dtc]?frac\s*(?:\{\s*([^{}]{1,64})\s*\}|([0-9]))\s*(?:\{\s*([^{}]{1,64})\s*\}|([0-9]))"
)
_REPLACED = (
    ("−", "-"), ("–", "-"), ("×", "\\times"), ("⋅", "\\cdot"), ("·", "\\cdot"), ("÷", "/"), ("\\$", "$"),
    ("\\%", "%"), ("\\{", "{"), ("\\}", "}"), ("\\circ", "°"), ("^{°}", "°"), ("^°", "°"), ("\\pi", "π"),
    ("\\infty", "∞"), ("\\cup", "∪"), ("\\le ", "≤"), ("\\leq", "≤"), ("\\geq", "≥"), ("\u00a0", " "),
    (" per cent", " percent"),
)  # fmt: skip


def _plain(text: str) -> str:
    """LaTeX and typographic spellings reduced to one plain spelling."""
    for old, new in _REPLACED:
        text = text.replace(old, new)
    text = _SPACING.sub(" ", _THOUSANDS.sub(",", text))
    text = _WORDS.sub(r" \1 ", text).strip()
    if text.startswith(("\\(", "\\[")) and text.endswith(("\\)", "\\]")):
        text = text[2:-2].strip()
    text = text.rstrip(".").strip()
    if len(text) > 2 and text[0] == text[-1] == "$":
        text = text.strip("$").strip().rstrip(".")
    text = text.strip("*`\"' ")
    return _FRACTION.sub(_as_quotient, text)


def _as_quotient(match: re.Match[str]) -> str:
    over, under = match[1] or match[2], match[3] or match[4]
    simple = re.fullmatch(r"-?[0-9]+", over) and re.fullmatch(r"-?[0-9]+", under)
    return f" {over}/{under}" if simple else f"({over})/({under})"


_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,12}|[0-9]{1,64})"
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s*(?P<money>[$€£¥]?)\s*(?P<sign2>[+-]?)\s*
    (?:(?P<whole>[0-9]{{1,18}})\s+(?P<mixed>[0-9]{{1,18}})\s*/\s*(?P<mixed_under>[0-9]{{1,18}})
      |(?P<over>{_DIGITS})\s*/\s*(?P<under_sign>-?)(?P<under>{_DIGITS})
      |(?P<decimal>{_DIGITS}(?:\.[0-9]{{0,64}})?|\.[0-9]{{1,64}})
       (?:[eE](?P<e>[+-]?[0-9]{{1,2}})(?![0-9A-Za-z])
         |\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{{?(?P<power>[+-]?[0-9]{{1,2}})\}}?)?)
    \s*(?P<rest>.*)""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES |= {"dozen": 12}
_UNIT = re.compile(r"[^\W\d_]+(?:[ /\-^]{1,2}(?:[^\W\d_]+|[23](?![0-9])))*\.?|°\s?[CF]?")
_SHORT = frozenset([*"LKCFVWA", *"st nd rd th am pm kb mb gb tb hz kw nm dm ha dl cc pt qt".split()])  # noqa: SIM905
"""Units of one or two letters beside those of `_ALIASES`; others are factors, as in 2xy or 2pi."""
_ALIASES = {
    "$": "dollar", "usd": "dollar", "buck": "dollar", "€": "euro", "eur": "euro", "£": "pound sterling",
    "¥": "yen", "m": "meter", "metre": "meter", "km": "kilometer", "kilometre": "kilometer",
    "cm": "centimeter", "centimetre": "centimeter", "mm": "millimeter", "millimetre": "millimeter",
    "kg": "kilogram", "g": "gram", "mg": "milligram", "lb": "pound", "lbs": "pound", "oz": "ounce",
    "l": "liter", "litre": "liter", "ml": "milliliter", "ft": "foot", "feet": "foot", "in": "inch",
    "inches": "inch", "yd": "yard", "mi": "mile", "s": "second", "sec": "second", "min": "minute",
    "h": "hour", "hr": "hour", "hrs": "hour", "mins": "minute", "°": "degree", "mph": "mile per hour",
    "people": "person", "children": "child", "men": "man", "women": "woman", "sq": "square",
}  # fmt: skip
_NOT_UNITS = frozenset(
    """or and to not plus minus times than but if e sqrt over log sin cos tan exp mod squared cubed factorial infinity
    halves thirds fourths fifths sixths sevenths eighths ninths tenths twelfths hundredths thousandths millionths
    billionths trillionths""".split()  # noqa: SIM905
)


def read_number(text: str) -> Number | None:
    """An exact number with its unit, or None: whatever is left over must read as a unit.

    >>> read_number("$1,200"), read_number("75%"), read_number("5 or 6")
    (Number(value=Fraction(1200, 1), unit='dollar'), Number(value=Fraction(3, 4), unit=''), None)
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    value = _value(match)
    if value is None:
        return None
    rest = match["rest"].strip()
    first = rest.split(" ", 1)[0].casefold()
    while first in _SCALES:
        value *= _SCALES[first]
        rest = rest[len(first) :].strip()
        first = rest.split(" ", 1)[0].casefold()
    if rest.startswith("%") or first in ("percent", "percent.", "pct"):
        value /= 100
        rest = rest[1:] if rest.startswith("%") else rest[len(first) :]
    attached = bool(match["rest"]) and not text.strip()[match.start("rest") - 1].isspace()
    unit = _unit(rest.strip(" ."), attached)
    if unit is None or (unit and match["money"]):
        return Number(value, _ALIASES[match["money"]]) if unit in ("dollar", "euro", "yen") else None
    return Number(value, _ALIASES.get(match["money"], match["money"]) or unit)


def _value(match: re.Match[str]) -> Fraction | None:
    """The value of the digits; None for a denominator of zero and for two signs."""
    if match["sign"] and match["sign2"]:
        return None
    if match["whole"]:
        if int(match["mixed_under"]) == 0:
            return None
        value = int(match["whole"]) + Fraction(int(match["mixed"]), int(match["mixed_under"]))
    elif match["over"]:
        under = int(match["under"].replace(",", ""))
        if under == 0:
            return None
        value = Fraction(int(match["over"].replace(",", "")), under)
        value = -value if match["under_sign"] else value
    else:
        whole, _, decimals = match["decimal"].replace(",", "").partition(".")
        value = Fraction(int((whole + decimals) or "0"), 10 ** len(decimals))
        exponent = match["e"] or match["power"]
        value = value * Fraction(10) ** int(exponent) if exponent else value
    return -value if "-" in (match["sign"], match["sign2"]) else value


def _unit(text: str, attached: bool) -> str | None:
    """The unit in one spelling, "" for none, None when the text is not a unit."""
    if not text:
        return ""
    if len(text) > 48 or not _UNIT.fullmatch(text):
        return None
    words = re.split(r"[ /\-]+", text.rstrip("."))
    if len(words) > 5 or all(map(_is_factor, words)) or (attached and text[0] == "x"):
        return None
    if any(word.casefold() in _NOT_UNITS for word in words):
        return None
    singular = [_ALIASES.get(word, _singular(word)) for word in (word.casefold() for word in words)]
    return " ".join(_ALIASES.get(word, word) for word in singular)


def _is_factor(word: str) -> bool:
    """Whether a word of one or two letters, maybe with a power, is no unit that is known."""
    letters = word.partition("^")[0]
    letters = letters if len(letters) == 1 else letters.casefold()
    return len(letters) < 3 and letters not in _SHORT and letters not in _ALIASES


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("xes", "ches", "shes", "sses")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 2 else word
