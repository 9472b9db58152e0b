"""Sokoban: rooms that are always solvable and whose difficulty is known, a solver, and the env."""

from shoal.envs.sokoban.env import SokobanConfig, SokobanEnv
from shoal.envs.sokoban.generator import generate
from shoal.envs.sokoban.levels import Level, parse_xsb, read_levels
from shoal.envs.sokoban.solver import Solution, solve

__all__ = [
    "Level",
    "SokobanConfig",
    "SokobanEnv",
    "Solution",
    "generate",
    "parse_xsb",
    "read_levels",
    "solve",
]
