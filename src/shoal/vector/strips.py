"""Text of a lane in shared memory: all strings of a reply joined, encoded once, with their lengths in front."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from shoal.vector.slots import Slots


class Strip:
    """A piece of shared memory for the strings of one leaf of one lane.

    Args:
        memory: writable bytes.
        most: the largest number of strings.
    """

    def __init__(self, memory: memoryview, most: int) -> None:
        head = 4 * (most + 2)
        self._head = memory[:head].cast("I")
        self._body = memory[head:]
        self.capacity = len(self._body)

    def pack(self, texts: Sequence[str]) -> bool:
        """Write the strings; False when they do not fit or are not all strings."""
        try:
            data = "".join(texts).encode("utf-8", "surrogatepass")
        except TypeError:
            return False
        size, count = len(data), len(texts)
        if size > self.capacity:
            return False
        head = self._head
        head[0], head[1] = count, size
        head[2 : 2 + count] = memoryview(array("I", map(len, texts)))
        self._body[:size] = data
        return True

    def unpack(self) -> list[str]:
        """The strings last written."""
        head = self._head
        count = head[0]
        whole = str(self._body[: head[1]], "utf-8", "surrogatepass")
        texts: list[str] = []
        start = 0
        for length in head[2 : 2 + count]:
            stop = start + length
            texts.append(whole[start:stop])
            start = stop
        return texts


def strips_of(slots: Slots, first: int, count: int) -> dict[int, Strip]:
    """The strips of the lane with the environments `first … first + count - 1`, by leaf."""
    strips: dict[int, Strip] = {}
    for leaf in slots.observations.text:
        rows = slots.obs[leaf]
        if rows is not None:
            flat = np.ascontiguousarray(rows[first : first + count]).reshape(-1)
            assert np.shares_memory(flat, rows)
            strips[leaf] = Strip(flat.data, count)
    return strips
