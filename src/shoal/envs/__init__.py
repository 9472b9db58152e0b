"""Environments by name, text ones for language-model agents first: `shoal.envs.make("frozen_lake")`."""

from shoal.envs.adapters.library import PrivateRandom
from shoal.envs.catalogue import make, names, register, resolve
from shoal.envs.text import TextEnv
from shoal.envs.tool_env import ToolEnv

__all__ = ["PrivateRandom", "TextEnv", "ToolEnv", "make", "names", "register", "resolve"]
