"""Random streams derived from one run seed by name, never shared and never global.

A stream is a pure function of `(seed, *names)`: a Philox counter generator keyed by a hash of them. Nothing
has to be saved to resume, and no order of work, worker or platform can change what a stream yields.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

Name = str | int


def _digest(seed: int, names: tuple[Name, ...]) -> bytes:
    """16 bytes from seed and names; parts are tagged and length-prefixed, so no two paths collide."""
    digest = hashlib.blake2b(digest_size=16, person=b"shoal-seed")
    for part in (seed, *names):
        if isinstance(part, str):
            tag, raw = b"s", part.encode("utf-8")
        elif isinstance(part, (int, np.integer)) and not isinstance(part, bool):
            tag, raw = b"i", str(int(part)).encode("ascii")
        else:
            raise TypeError(f"seeds and stream names must be int or str, got {type(part).__name__}: {part!r}")
        digest.update(tag + struct.pack("<I", len(raw)) + raw)
    return digest.digest()


def derive_seed(seed: int, *names: Name) -> int:
    """A seed in [0, 2**63) for the stream that `names` name, for code that wants an integer.

    >>> derive_seed(0, "env", 3) == derive_seed(0, "env", 3)
    True
    >>> derive_seed(0, "env", 3) == derive_seed(0, "env", 4)
    False
    """
    return int.from_bytes(_digest(seed, names)[:8], "little") >> 1


def stream_key(seed: int, *names: Name) -> tuple[int, int]:
    """Two 64-bit words that key a counter-based generator for the stream that `names` name."""
    low, high = struct.unpack("<QQ", _digest(seed, names))
    return low, high


def stream(seed: int, *names: Name) -> np.random.Generator:
    """A fresh NumPy generator for the stream that `names` name; the same call gives the same numbers.

    >>> float(stream(7, "minibatch", 2).random()) == float(stream(7, "minibatch", 2).random())
    True
    """
    return keyed(stream_key(seed, *names))


def keyed(words: tuple[int, int]) -> np.random.Generator:
    """The generator of a `stream_key`."""
    key: Any = _Key(words)
    return np.random.Generator(np.random.Philox(key))


class _Key(ISeedSequence):
    """A key for Philox as it is; `Philox(key=)` would first gather entropy that it then does not use."""

    def __init__(self, words: tuple[int, int]) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        """The key, which is all that Philox asks for."""
        return np.array(self.words, dtype=np.uint64)
