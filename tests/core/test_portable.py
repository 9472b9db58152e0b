"""Core, envs and vector import nothing at their top that only Unix has."""

import subprocess
import sys
from pathlib import Path

UNIX = """
import importlib, os, sys
import cloudpickle, gymnasium, msgspec, multiprocessing.connection, multiprocessing.shared_memory, numpy, psutil
import subprocess, yaml
for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty"):
    sys.modules[name] = None  # an import of it fails
for name in ("register_at_fork", "sched_getaffinity", "pread", "pwrite", "getuid", "fork", "killpg", "O_CLOEXEC"):
    delattr(os, name)
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_core_envs_and_vector_import_where_there_is_no_unix():
    root = Path(__file__).parents[2] / "src"
    names = [
        ".".join(path.relative_to(root).with_suffix("").parts)
        for room in ("core", "envs", "vector")
        for path in sorted((root / "shoal" / room).rglob("*.py"))
        if path.name not in ("__init__.py", "processes.py", "sb3.py")
    ]
    done = subprocess.run([sys.executable, "-c", UNIX, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
