"""The tiny model by its earlier name."""

from shoal.samplers.tiny import TinyEngine, TinyShape

__all__ = ["TinyEngine", "TinyShape"]
