"""HTML and SVG from Python. Whatever is not `Html` already is escaped: text of a model or an environment stays text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

NONE = "\N{EN DASH}"
"""What stands where there is no value."""
_VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "source"})
_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*")
_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in range(32) if chr(code) not in "\t\n\r"}
_CONTROL |= dict.fromkeys(range(0xD800, 0xE000), "\N{REPLACEMENT CHARACTER}")
_CONTROL |= {
    code: f"\N{LEFT-POINTING ANGLE BRACKET}U+{code:04X}\N{RIGHT-POINTING ANGLE BRACKET}"
    for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
"""What is shown instead of control characters, lone surrogates and marks that turn the direction of text around."""


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def escape(value: object) -> Html:
    """A value as markup that shows it, safe in text and in attributes; `Html` stays as it is."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(str(value).translate(_CONTROL)))


def tag(element: str, *children: Any, **attributes: Any) -> Html:
    """One element. Children that are None or False are left out, lists are opened; `class_` means `class`.

    An attribute of None or False is left out, one of True stands without value; `data_x` means `data-x`.
    """
    written = [element]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        name = key.rstrip("_").replace("_", "-")
        if not _NAME.fullmatch(name) or name.startswith("on"):
            raise ValueError(f"{key!r} is no attribute that may be written")
        if name in ("href", "src") and not _is_safe(str(value)):
            raise ValueError(f"{str(value)[:40]!r} is no address that may be linked")
        written.append(name if value is True else f'{name}="{escape(value)}"')
    opened = f"<{' '.join(written)}>"
    return Html(opened if element in _VOID else f"{opened}{join(*children)}</{element}>")


def join(*children: Any) -> Html:
    """Children one behind the other."""
    parts: list[str] = []
    for child in children:
        if child is None or child is False:
            continue
        if isinstance(child, str) or not isinstance(child, Iterable):
            parts.append(escape(child))
        else:
            parts.append(join(*child))
    return Html("".join(parts))


def _is_safe(address: str) -> bool:
    """Whether an address is of this page, this site, or a picture."""
    pictures = tuple(f"data:image/{kind};" for kind in ("png", "jpeg", "gif", "webp", "bmp"))
    return address.startswith(("/", "#", "?", *pictures)) and not address.startswith(("//", "/\\"))


def number(value: Any, digits: int = 4) -> str:
    """A value of a metric, as short as it can be read.

    >>> [number(v) for v in (3, 0.123456, 1234567.0, 1.5e-7, True)]
    ['3', '0.1235', '1,234,567', '1.5e-07', 'yes']
    """
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e15:
            return f"{int(value):,}"
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.{digits}g}"
    return str(value)


def counted(n: int, noun: str) -> str:
    """`1 turn`, `2 turns`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
