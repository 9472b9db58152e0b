"""Checks that users run on their own parts and machines; each failure says which promise broke and how."""

from shoal.envs.check import check_text_env
from shoal.testing.checks import check_engine, check_executor, check_vector_env, check_world
from shoal.testing.installation import examine

__all__ = ["check_engine", "check_executor", "check_text_env", "check_vector_env", "check_world", "examine"]
