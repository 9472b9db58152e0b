"""One thread per test process: two of them share two cores, and L2 engines promise bit-equality with one."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
