"""Many environments stepped in parallel: `make_vec` and what stands on it."""

from shoal.vector.container import MultiProcessEnvironmentContainer
from shoal.vector.make import make_vec
from shoal.vector.pool import VectorPool, groups
from shoal.vector.results import Ready, StepResult

__all__ = ["MultiProcessEnvironmentContainer", "Ready", "StepResult", "VectorPool", "groups", "make_vec"]
