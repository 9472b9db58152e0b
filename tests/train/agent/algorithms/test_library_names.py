"""The table of the names of TRL and verl has settings that exist here."""

import subprocess
import sys
from pathlib import Path

from docs.library_names import TRL, VERL

from shoal.core.configuration import to_mapping
from shoal.train.agent.config import compose_config

ROOT = Path(__file__).parents[4]


def test_what_stands_beside_them_are_settings_that_can_be_said_together():
    for names in (TRL, VERL):
        words = [word for name in names for word in name.shoal if "=" in word]
        said = dict(word.split("=") for word in words)
        config = to_mapping(compose_config("smollm2", [f"{key}={value}" for key, value in said.items()]))
        for name in names:
            for word in name.shoal:
                node = config
                for part in word.partition("=")[0].split("."):
                    node = node[part]
        assert said["algorithm.kl.coef"] == "0.0"


def test_the_tables_of_the_docs_are_what_the_source_says():
    write = (
        "import sys; sys.path.insert(0, 'docs'); import make_presets as m; "
        "print(all(path.read_text() == text for path, text in m.pages().items()))"
    )
    done = subprocess.run([sys.executable, "-c", write], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True", "the tables are of another source: run make settings"
