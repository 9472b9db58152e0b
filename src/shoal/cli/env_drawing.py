"""How envs look in a terminal: grid worlds in color, everything else as it is."""

from __future__ import annotations

import sys
from typing import Any

from rich.text import Text

_SOKOBAN = {
    "#": ("██", "rgb(122,94,84)"),
    "_": ("  ", ""),
    "O": ("◎ ", "bold red"),
    "√": ("▣ ", "bold green"),
    "X": ("▣ ", "bold yellow"),
    "P": ("☻ ", "bold cyan"),
    "S": ("☻ ", "bold cyan on dark_red"),
}
_FROZEN_LAKE = {
    "_": ("· ", "bright_black"),
    "O": ("● ", "blue"),
    "G": ("⚑ ", "bold yellow"),
    "P": ("☻ ", "bold cyan"),
    "X": ("☻ ", "bold white on blue"),
    "√": ("☻ ", "bold green"),
}


def draw(observation: str) -> Text:
    """An observation for a terminal; which grid world it is shows in its symbols."""
    symbols = set(observation) - {"\n"}
    for world, sign in ((_SOKOBAN, "#"), (_FROZEN_LAKE, "_")):
        if sign in symbols and symbols <= world.keys():
            drawn = Text()
            for symbol in observation:
                text, style = ("\n", "") if symbol == "\n" else world[symbol]
                drawn.append(text, style)
            return drawn
    return Text(observation)


KEYS = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "w": "up",
    "s": "down",
    "d": "right",
    "a": "left",
}
"""What arrow keys send, and the letters for keyboards without them."""


def read_key() -> str:
    """One key from the terminal, without waiting for Enter; arrow keys come as one."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before: Any = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        import os
        import select

        key = os.read(terminal, 1)
        while select.select([terminal], [], [], 0.02)[0] and len(key) < 8:
            key += os.read(terminal, 1)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
    return key.decode("utf-8", "replace")
