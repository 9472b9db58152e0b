"""Checks that users run on their own parts; each failure says which promise broke and how."""

from shoal.testing.engines import check_engine
from shoal.testing.executors import check_executor
from shoal.testing.text_envs import check_text_env
from shoal.testing.vector_envs import check_vector_env
from shoal.testing.worlds import check_world

__all__ = ["check_engine", "check_executor", "check_text_env", "check_vector_env", "check_world"]
