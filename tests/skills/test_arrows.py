from __future__ import annotations

import os
import subprocess
import sys

from shoal.skills.graph.launchers import job_environment


def test_the_skills_room_stays_light_until_it_draws_or_trains_in_craftax() -> None:
    code = (
        "import sys, shoal.skills.scheduler, shoal.skills.learning.merge, shoal.cli.skills;"
        "heavy = {'torch', 'jax', 'ray', 'matplotlib', 'PIL', 'transformers', 'shoal.train'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    env = {**os.environ, **job_environment(1)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
