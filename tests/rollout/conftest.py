import os
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def ray_finds_shoal():
    """Workers of Ray start from its own node processes and find shoal as on the user's cluster: installed."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
