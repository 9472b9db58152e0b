"""What all tests share: one thread per test process, and properties that are not judged by the clock.

Two test processes share two cores, and the engines promise bit-equality with one thread.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

from hypothesis import settings

settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")
