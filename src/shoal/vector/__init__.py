"""Many environments stepped in parallel: `make_vec` and what stands on it."""

from shoal.vector.container import MultiProcessEnvironmentContainer
from shoal.vector.make import make_vec
from shoal.vector.pool import StepResult, VectorPool, groups

__all__ = ["MultiProcessEnvironmentContainer", "StepResult", "VectorPool", "groups", "make_vec"]
