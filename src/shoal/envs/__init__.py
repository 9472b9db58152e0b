"""Environments by name, text ones for language-model agents first: `shoal.envs.make("frozen_lake")`."""

from shoal.envs.catalogue import make, names, register, resolve
from shoal.envs.text import TextEnv

__all__ = ["TextEnv", "make", "names", "register", "resolve"]
