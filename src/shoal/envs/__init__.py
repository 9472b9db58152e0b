"""Text environments for language-model agents, by name: `shoal.envs.make("frozen_lake")`."""

from shoal.envs.catalogue import make, names, register
from shoal.envs.text import TextEnv

__all__ = ["TextEnv", "make", "names", "register"]
