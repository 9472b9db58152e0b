"""Adam (arXiv:1412.6980) on one flat vector; the compiled kernels and torch have it for theirs."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


class Adam:
    """Moments of a flat vector of float32, and the step that they lead to.

    Args:
        size: of the vector.
    """

    def __init__(self, size: int) -> None:
        self.mean = np.zeros(size, np.float32)
        self.square = np.zeros(size, np.float32)
        self.count = 0

    def step(self, flat: Array, gradient: Array, lr: float, max_norm: float) -> None:
        """Move `flat` in place, by a gradient whose norm is clipped to `max_norm`."""
        norm = float(np.sqrt(np.dot(gradient, gradient)))
        if norm > max_norm:
            gradient = gradient * np.float32(max_norm / norm)
        self.count += 1
        self.mean += np.float32(0.1) * (gradient - self.mean)
        self.square += np.float32(0.001) * (gradient * gradient - self.square)
        rate = np.float32(lr / (1 - 0.9**self.count))
        spread = np.sqrt(self.square * np.float32(1 / (1 - 0.999**self.count)))
        flat -= rate * self.mean / (spread + np.float32(1e-5))
